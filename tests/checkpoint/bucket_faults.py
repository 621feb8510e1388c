"""`python -m tests.checkpoint.bucket_faults`: saves to a bucket that are killed, or meet faults.

A process saves checkpoints to an S3 server all the time, and is killed at random moments. The next
one reads what is there: the newest checkpoint has to be intact, and no older than the last save
that was reported complete. A table of faults follows: requests that fail, stall or are refused.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# The process must be single-threaded when it forks.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import numpy as np
import pytest

from tests.faults.forks import Forked, Report
from tests.support import buckets
from tests.support.buckets import Fault
from tfdist.checkpoint.bucket_lock import BucketLock
from tfdist.checkpoint.locations import store_at
from tfdist.checkpoint.snapshot import Packed
from tfdist.checkpoint.store import Place

#: Sizes of the arrays of a checkpoint; the last one is uploaded in several parts.
SIZES = (10, 1000, 1_500_000)
#: Faults of one request in five, or of all writes.
FAULTS: dict[str, Callable[[int, str], Fault]] = {
    "none": lambda number, method: "",
    "500, one request in 5": lambda number, method: "500" if number % 5 == 0 else "",
    "503, one request in 5": lambda number, method: "503" if number % 5 == 0 else "",
    "closed in the middle, one in 5": lambda number, method: "cut" if number % 5 == 0 else "",
    "stalled, one request in 30": lambda number, method: "stall" if number % 30 == 0 else "",
    "out of quota (507 for writes)": lambda number, method: "507" if method != "GET" else "",
    "writes refused (403)": lambda number, method: "403" if method != "GET" else "",
}


def save_forever(url: str, report: Report) -> None:
    """Reports what the previous process left, and then saves until it is killed."""
    lock, store = BucketLock(url), store_at(url)
    lock.acquire()
    damaged: list[str] = []
    newest = store.load_newest(damaged.append)
    store.clean()
    step = _step(newest[1]) if newest else 0
    report(f"found {step} {len(damaged)}")
    for number in itertools.count(step + 1):
        report("save")
        store.write(Place(number, 0), _packed(number), {"step": number})
        report(f"saved {number}")
        store.keep(2, None)


def kill_savers(num_kills: int, seed: int, url: str, folder: Path) -> dict[str, int]:
    """Kills several savers.

    Args:
        num_kills: Number of kills.
        seed: Seed of the moments.
        url: Folder of the checkpoints; the environment names the server.
        folder: Local folder for logs.

    Returns:
        Number of kills, of kills after which the newest checkpoint was intact and not older than
        the last complete save, and of damaged checkpoints.
    """
    moments = random.Random(seed)
    counts = {"kills": 0, "intact": 0, "damaged": 0}
    last_saved = 0
    for number in range(num_kills + 1):  # the last one inspects the result of the last kill
        log = folder / f"log-{number}"
        child = Forked(lambda report: save_forever(url, report), {}, log)
        num_saves = moments.randint(1, 4)
        while child.marks.count("save") < num_saves:
            child.read_marks()
            assert not child.ended(), log.read_text()[-2000:]
        time.sleep(moments.uniform(0, 0.3))
        child.signal(signal.SIGKILL)
        while not child.ended():
            time.sleep(0.001)
        (found,) = [mark for mark in child.marks if mark.startswith("found")]
        step, damaged = map(int, found.split()[1:])
        if number:
            counts["kills"] += 1
            counts["intact"] += int(not damaged and step >= last_saved)
            counts["damaged"] += damaged
        saved = [int(mark.split()[1]) for mark in child.marks if mark.startswith("saved")]
        last_saved = max([step, *saved])
    return counts


def meet_faults(url: str, proxy: buckets.Proxy, num_saves: int) -> dict[str, str]:
    """Returns what became of several saves, by fault."""
    results = {}
    for number, (name, choose) in enumerate(FAULTS.items()):
        store, failed = store_at(f"{url}-{number}"), 0
        requests = itertools.count(1)

        def fault(
            method: str,
            path: str,
            choose: Callable[[int, str], Fault] = choose,
            requests: itertools.count[int] = requests,
        ) -> Fault:
            return choose(next(requests), method)

        proxy.fault = fault
        for step in range(1, num_saves + 1):
            try:
                store.write(Place(step, 0), _packed(step), {"step": step})
                store.keep(2, None)
            except OSError:
                failed += 1
        proxy.fault = lambda method, path: ""
        seen = len(store.places())
        store.finish()
        newest = store.load_newest(print)
        assert newest is not None
        assert _step(newest[1]) == num_saves
        results[name] = f"{failed} of {num_saves} saves failed and were reported, {seen} left; "
        results[name] += "the last one is intact after the fault has ended"
    return results


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--saves", type=int, default=5, metavar="N", help="saves for each fault")
    given = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as name,
        buckets.s3_server() as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        buckets.create_bucket(address, "bucket")
        patch.setenv("XDG_CACHE_HOME", f"{name}/cache")
        for key, value in {**buckets.ENVIRONMENT, "AWS_ENDPOINT_URL": address}.items():
            patch.setenv(key, value)
        counts = kill_savers(given.kills, given.seed, "s3://bucket/kills", Path(name))
        print(", ".join(f"{key} {value}" for key, value in counts.items()), flush=True)
        with buckets.through_proxy(address, patch) as proxy:
            for fault, result in meet_faults("s3://bucket/faults", proxy, given.saves).items():
                print(f"{fault}: {result}", flush=True)
    return 0 if counts["intact"] == counts["kills"] else 1


def _packed(number: int) -> Packed:
    arrays = {f"array {i}": np.full(size, number, "int64") for i, size in enumerate(SIZES)}
    return Packed('{"paths": {}, "state": {}}', arrays)


def _step(packed: Packed) -> int:
    (step,) = {int(value) for array in packed.arrays.values() for value in np.unique(array)}
    return step


if __name__ == "__main__":
    sys.exit(main())
