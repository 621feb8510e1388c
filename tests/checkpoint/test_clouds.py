"""Data and runs in Azure's emulator, and in the stand-in for Google Cloud Storage.

See `tests.support.buckets`: the stand-in is an S3 server behind a proxy. Google's own service was
never tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pipelines
from pipelines.check import main as check
from pipelines.pack.__main__ import main as pack
from pipelines.storage import ChangedError
from pipelines.verify import main as verify
from tests.checkpoint.training import weights_after
from tests.support import buckets
from tfdist.checkpoint.lock import lock_of

buckets.require_s3()


@pytest.fixture(params=["gs", "az"])
def root(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of an empty bucket."""
    program = {"gs": "moto", "az": "azurite-blob"}[request.param]
    if program != "moto":
        buckets.require(program)
    create = {"gs": buckets.create_bucket, "az": buckets.create_container}[request.param]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (
        buckets.running(program, tmp_path / "server") as server,
        buckets.through_proxy(server.address, monkeypatch),
    ):
        create(server.address, "bucket")
        yield f"{request.param}://bucket"


def test_pack_read_checkpoint_and_resume(root: str, tmp_path: Path) -> None:
    """Equal to local folders, also if the first checkpoint was written by another process."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}\n" for i in range(100)))
    options = ["--num-shards", "3", "--num-workers", "1"]
    assert pack([str(text), str(tmp_path / "packed"), *options]) == 0
    for part in ("2/2", "1/2"):
        assert pack([str(text), f"{root}/packed", *options, "--part", part]) == 0
    assert pipelines.load_index(f"{root}/packed") == pipelines.load_index(tmp_path / "packed")
    assert verify([f"{root}/packed", "--num-workers", "1"]) == 0
    assert check([f"{root}/packed", "--num-workers", "2"]) == 0

    result = weights_after([1, 3], f"{root}/run")
    np.testing.assert_equal(result, weights_after([3], tmp_path / "run"))


def test_conditional_writes_and_locks(root: str) -> None:
    path = buckets.remote(f"{root}/a")
    first = path.write_bytes(b"1", overwrite=False)
    with pytest.raises(FileExistsError):
        path.write_bytes(b"2", overwrite=False)
    path.replace(b"3", first)
    with pytest.raises(ChangedError):
        path.replace(b"4", first)
    assert path.read_bytes() == b"3"
    lock = lock_of(f"{root}/run")
    lock.acquire()
    assert lock_of(f"{root}/run").is_held()
    lock.release()
    assert not lock_of(f"{root}/run").is_held()
