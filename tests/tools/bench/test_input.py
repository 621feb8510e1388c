"""The input benchmark: that it runs and writes results, not its speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import pipelines
from benchmarks import input_peers
from tfdist.tools.bench import input as input_benchmark
from tfdist.tools.bench import photographs
from tfdist.tools.bench.__main__ import main
from tfdist.tools.bench.input_readers import LIMIT, OURS, PACKED, READERS

ALL = READERS | input_peers.available()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    photographs.create(directory / "bench", 96)
    return directory


def test_photographs_are_created_once(data_dir: Path) -> None:
    created = photographs.create(data_dir / "bench", 96)
    sizes = [len(image) for image in photographs.encoded(created)]
    assert len(sizes) == created.num_images
    assert min(sizes) >= 30_000
    assert max(sizes) <= 100_000
    assert len(set(sizes)) > 90  # all different


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("PyTorch DataLoader", "grain")])
def test_reader_never_ends(name: str, data_dir: Path) -> None:
    steps = ALL[name](photographs.create(data_dir / "bench", 96))
    counts = [next(steps) for _ in range(4)]
    assert set(counts) <= {64, 32}


def test_tfds_is_measured_in_every_round(data_dir: Path) -> None:
    pytest.importorskip("tensorflow_datasets")
    for _ in range(2):
        assert next(input_peers.by_tfds(photographs.create(data_dir / "bench", 96))) > 0


def test_ratios_are_of_the_same_round(data_dir: Path) -> None:
    naive = "tf.data, naive"
    readers = {name: READERS[name] for name in (LIMIT, OURS, PACKED, naive)}
    results = input_benchmark.compare(readers, photographs.create(data_dir / "bench", 96), 64, 2)
    ratios = [
        a / b for a, b in zip(results[OURS]["samples"], results[LIMIT]["samples"], strict=True)
    ]
    assert results[LIMIT]["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
    assert "ratio" not in results[OURS]
    assert results[naive]["packed_ratio"]["goal"] == input_benchmark.OTHERS_GOAL
    assert {len(input_benchmark._cells(own)) for own in results.values()} == {4}  # of the table


@pytest.mark.long
def test_large_images_are_packed_at_full_size(tmp_path: Path) -> None:
    created = photographs.create(tmp_path, 10, large=True)
    assert {Image.open(path).size for path in created.files.glob("*/*")} == {
        (2000, 1500),
        (1500, 2000),
    }
    assert sum(shard.num_records for shard in pipelines.load_index(created.packed).shards) == 10
    assert next(READERS["pipelines"](created)) == 10


def test_command_with_a_model(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "input.json"
    flags = ["--with-model", "--num-images", "96", "--data-dir", str(data_dir)]
    assert main(["input", *flags, "--json", str(results)]) == 0
    document = json.loads(results.read_text())
    assert document["benchmark"] == "input"
    assert 0 <= document["results"]["with_model"]["data_wait"] <= 1
    assert "waited for data" in capsys.readouterr().out
