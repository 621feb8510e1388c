"""Checkpoints in a bucket stay intact if their writer is killed or meets faults."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import ROOT


def test_kills_and_every_fault() -> None:
    pytest.importorskip("obstore", reason="needs the extra 'cloud'")
    pytest.importorskip("moto", reason="needs the S3 server of the extra 'dev'")
    command = [sys.executable, "-m", "tests.checkpoint.bucket_faults", "--kills=3", "--saves=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills 3, intact 3, damaged 0" in done.stdout
    # How many of the saves fail depends on the machine's load: retries stop after 20 s.
    row = r"\| server unreachable for 3 s \| \d of 2.* \| intact \| each record once, in order \|"
    assert re.search(row, done.stdout), done.stdout


def test_kills_of_a_rank_that_writes_its_shards() -> None:
    pytest.importorskip("obstore", reason="needs the extra 'cloud'")
    pytest.importorskip("moto", reason="needs the S3 server of the extra 'dev'")
    command = [sys.executable, "-m", "tests.checkpoint.joint_kills", "--kills=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for place in ("folder", "bucket"):
        row = rf"{place}: kills 3, intact 3, damaged 0, in parts \d, left over \d"
        assert re.search(row, done.stdout), done.stdout
