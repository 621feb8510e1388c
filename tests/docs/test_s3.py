"""Every command of the page "Train from S3" runs in the order of the page, with a server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.commands import commands
from tests.support import ROOT, buckets
from tests.support.starting import python

PAGE = "docs/s3.md"


@pytest.mark.long
@pytest.mark.processes
def test_commands_run_in_their_order(s3_server: str, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        folder = tmp_path / "corpus" / split
        folder.mkdir(parents=True)
        lines = [f"line {i} of the text of {split}\n" for i in range(500)]
        for i in range(4):
            (folder / f"{i}.txt").write_text("".join(lines[i::4]))
    shown = [one for one in commands() if one.page == PAGE]
    assert len(shown) >= 8
    buckets.create_bucket(s3_server, "bucket")
    environment = os.environ | buckets.ENVIRONMENT
    environment |= {"AWS_ENDPOINT_URL": s3_server, "PYTHONPATH": str(ROOT)}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "home")}
    for one in shown:
        small = ["--limit-steps=3"] if one.module == "tfdist.train" else []
        if small and "--evaluate" not in one.arguments:
            small.append("--warmup-epochs=0")
        python("-m", one.module, *one.arguments, *small, cwd=tmp_path, env=environment)
