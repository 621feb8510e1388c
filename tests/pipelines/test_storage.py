"""Paths in object stores: names, errors and transfers that end early."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from pipelines.storage import RemotePath
from pipelines.writing.publish import ShardWriter
from tests.support.packages import require_obstore

require_obstore()
_numbers_of_folders = itertools.count()


@pytest.fixture
def folder() -> RemotePath:
    return RemotePath(f"memory://bucket/storage-{next(_numbers_of_folders)}")


def test_failed_shard_leaves_the_former_object(folder: RemotePath) -> None:
    """Otherwise a part that runs twice could replace a published shard by a partial one."""
    (folder / "b").write_bytes(b"complete")
    for name in "ab":
        with contextlib.suppress(InterruptedError), ShardWriter(folder / name) as writer:
            writer.write(b"partial")
            raise InterruptedError
    assert folder.sizes() == {"b": 8}
