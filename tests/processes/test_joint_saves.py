"""Each rank writes its shards of a checkpoint, which any number of processes resumes from."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfdist
from tests.processes import joint_saves
from tests.support import buckets
from tests.support.training import FIT, assert_close, momentum
from tfdist.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("joint-saves")]

URL = "s3://bucket/run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("joint") / "run"


@pytest.fixture(scope="module")
def found(folder: Path) -> Iterator[dict[str, Any]]:
    """The results of both processes, from one start."""
    buckets.require_s3()
    with pytest.MonkeyPatch.context() as patch, buckets.with_bucket(folder.parent, patch):
        scenario = functools.partial(joint_saves.run, str(folder), URL)
        yield tfdist.notebook_launch(scenario, num_workers=2)


def test_each_rank_writes_its_shards(found: dict[str, Any], folder: Path) -> None:
    sizes_of_weights = [v.shape.num_elements() for v in momentum().trainable_variables]
    num_sharded = sum(size for size in sizes_of_weights if size > 1)
    num_of_rank_1 = sum(size // 2 for size in sizes_of_weights)
    for sizes in found["folders"].values():
        assert set(sizes) == {"data-00000-of-00002", "data-00001-of-00002", "index", "json"}
        assert sizes["data-00001-of-00002"] == 2 * 4 * num_of_rank_1  # with momentum, in float32
        assert sizes["data-00000-of-00002"] >= 2 * 4 * (num_sharded - num_of_rank_1)


@pytest.mark.parametrize("is_bucket", [False, True])
def test_one_process_resumes(found: dict[str, Any], folder: Path, is_bucket: bool) -> None:
    settings = tfdist.Checkpoints(URL if is_bucket else folder)
    trainer = Trainer(momentum, "one_device", checkpoints=settings)
    trainer.fit(**FIT, epochs=joint_saves.NUM_EPOCHS + 1)
    assert_close(trainer.model.get_weights(), plain_weights())


def plain_weights() -> list[Any]:
    """Returns the weights that plain Keras trains in one epoch more than the ranks."""
    plain = momentum()
    plain.fit(**FIT, epochs=joint_saves.NUM_EPOCHS + 1)
    return plain.get_weights()


def test_each_rank_reads_its_shards(found: dict[str, Any]) -> None:
    weights, (of_rank_0, of_rank_1) = found["resumed"]
    assert_close(weights, plain_weights())
    sizes = [v.shape.num_elements() for v in momentum().trainable_variables]
    sharded = [size for size in sizes if size > 1] * 2  # with momentum
    assert sorted(map(sum, zip(of_rank_0, of_rank_1, strict=True))) == sorted(sharded)
    assert sum(of_rank_1) == sum(size // 2 for size in sharded)


def test_rank_0_chooses_the_time_of_a_save(found: dict[str, Any]) -> None:
    assert found["by time"] > joint_saves.NUM_EPOCHS


def test_failed_part_is_reported_on_all_ranks_and_repeated_at_the_end(found: Any) -> None:
    for (text, epochs), wanted in zip(
        found["failures"]["first"], ("rank 1 could not", "disk is"), strict=True
    ):
        assert "Could not write a checkpoint to" in text
        assert wanted in text
        assert epochs == [3, 2]
    for text, epochs in found["failures"]["last"]:
        assert "Trying again." in text
        assert "error:" not in text
        assert epochs == [3, 2, 1]
    for text, epochs in found["failures"]["last twice"]:
        assert "error: Could not write a checkpoint" in text
        assert epochs == [2, 1]


def test_rank_0_writes_and_reads_all_if_the_ranks_share_no_folder(found: dict[str, Any]) -> None:
    (text, num_first), (_, num_second) = found["not shared"]
    assert "Rank 1 cannot write to" in text
    assert f"Resuming after {joint_saves.NUM_EPOCHS} epochs" in text
    assert (num_first, num_second) == (joint_saves.NUM_EPOCHS + 1, 0)
