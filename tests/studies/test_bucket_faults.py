"""Checkpoints in a bucket stay intact if their writer is killed or meets faults."""

from __future__ import annotations

import re
import sys

from tests.support import buckets, starting


def output_of(module: str, *flags: str) -> str:
    buckets.require_s3()
    return starting.run(sys.executable, "-m", f"tests.studies.{module}", *flags).stdout


def test_kills_and_every_fault() -> None:
    output = output_of("bucket_faults", "--kills=3", "--saves=2")
    assert "kills 3, whole 3, one save old 0, older 0" in output
    # How many of the saves fail depends on the machine's load: retries stop after 20 s.
    row = r"\| server unreachable for 3 s \| \d of 2.* \| intact \| each record once, in order \|"
    assert re.search(row, output), output


def test_kills_of_a_rank_that_writes_its_shards() -> None:
    output = output_of("joint_kills", "--kills=3")
    for place in ("folder", "bucket"):
        row = rf"{place}: kills 3, intact 3, damaged 0, in parts \d, left over \d"
        assert re.search(row, output), output
