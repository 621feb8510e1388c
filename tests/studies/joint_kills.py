"""`python -m tests.studies.joint_kills`: kills one of two ranks that save together.

Two processes write the shards of one checkpoint after another, to a folder and to a bucket, until
one of them is killed at a random moment, and the other by its launcher. The next two have to find
the newest checkpoint intact and no older than the last one that was complete, and their first save
has to remove what the killed ones left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

# The process must be single-threaded when it forks.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

import numpy as np
import pytest
import tensorflow as tf

from tests.studies.faults.forks import Forked, Report
from tests.support import buckets
from tfdist.checkpoint import joint_save, manifest
from tfdist.checkpoint.joint_save import JointSave, target_at
from tfdist.checkpoint.snapshot import Packed, Shard
from tfdist.checkpoint.store import Place, store_at

#: Elements of a rank's shard; it is uploaded in two parts.
SIZE = 1_500_000
_TEXT = '{"paths": {}, "state": {}}'


def save_forever(url: str, rank: int, run: str, progress: Path, report: Report) -> None:
    """Saves until it is killed.

    Args:
        url: Folder of the checkpoints.
        rank: This rank, of two. Rank 0 reports what the ranks before have left.
        run: Name of this start of both.
        progress: The file in which rank 0 writes the last save that it has completed.
        report: Reports a mark.
    """
    store = store_at(url)
    if not rank:
        damaged: list[str] = []
        newest = store.load_newest(damaged.append)
        step, num_left = _step(newest[1]) if newest else 0, num_unlisted(url)
        store.clean()
        _write(progress, step)
        report(f"found {step} {len(damaged)} {int(num_left > 0)}")
    for number in itertools.count(int(progress.read_text()) + 1):
        while int(progress.read_text()) < number - 1:
            time.sleep(0.005)
        save = JointSave(Place(number, 0), f"{run}-{number}", rank, 2)
        target = target_at(url, save)
        values = tf.fill([SIZE], np.int64(number))
        shard = Shard("whole", (2, SIZE), rank * SIZE, values)
        report("save")
        own = joint_save.write_part(target, Packed(_TEXT, {}, [shard]), save)
        if not rank:
            joint_save.complete(target, own, _TEXT, {"step": number}, save)
            report(f"saved {number}")
            store.clean()
            store.keep(2, None)
            report(f"unlisted {num_unlisted(url)}")
            _write(progress, number)


def kill_ranks(num_kills: int, seed: int, url: str, folder: Path) -> dict[str, int]:
    """Kills one of two ranks several times.

    Args:
        num_kills: Number of kills.
        seed: Seed of the moments.
        url: Folder of the checkpoints.
        folder: Local folder for logs.

    Returns:
        Number of kills; of kills after which the newest checkpoint was intact and not older than
        the last complete save; of damaged checkpoints; of kills that left a part of a checkpoint;
        and of files that were left over after the next save.
    """
    moments, last_saved = random.Random(seed), 0
    counts = {"kills": 0, "intact": 0, "damaged": 0, "in parts": 0, "left over": 0}
    for start in range(num_kills + 1):  # the last one inspects the result of the last kill
        progress = folder / f"progress-{start}"
        ranks: list[Forked] = []
        for rank in (0, 1):
            log = folder / f"log-{start}-{rank}"
            arguments = (url, rank, f"start{start}", progress)
            ranks.append(Forked(lambda report, a=arguments: save_forever(*a, report), {}, log))
            while not rank and not any(mark.startswith("found") for mark in ranks[0].marks):
                ranks[0].read_marks()
                assert not ranks[0].ended(), log.read_text()[-2000:]
        first, victim = ranks[0], moments.choice(ranks)
        num_saves, begins = moments.randint(2, 4), [0.0]
        while len(begins) <= num_saves:
            victim.read_marks()
            assert not any(one.ended() for one in ranks), log.read_text()[-2000:]
            num_begun = victim.marks.count("save") + 1
            begins += [time.monotonic()] * (num_begun - len(begins))
        time.sleep(moments.uniform(0, begins[-1] - begins[-2]))  # as long as the save before
        victim.signal(signal.SIGKILL)
        time.sleep(moments.choice([0, 0.2]))
        for one in ranks:
            one.signal(signal.SIGKILL)
        while not all(one.ended() for one in ranks):
            time.sleep(0.001)
        (found,) = [mark for mark in first.marks if mark.startswith("found")]
        step, damaged, in_parts = map(int, found.split()[1:])
        if start:
            counts["kills"] += 1
            counts["intact"] += int(not damaged and step >= last_saved)
            counts["damaged"] += damaged
            counts["in parts"] += in_parts
        counts["left over"] += sum(_numbers(first, "unlisted"))
        last_saved = max([step, *_numbers(first, "saved")])
    return counts


def _numbers(child: Forked, mark: str) -> list[int]:
    return [int(line.split()[1]) for line in child.marks if line.startswith(f"{mark} ")]


def num_unlisted(url: str) -> int:
    """Returns the number of files that belong to no checkpoint."""
    store, listed = store_at(url), set()
    for place in store.places():
        with contextlib.suppress(manifest.DamagedError):  # a folder that was not removed completely
            names = manifest.read(store.path(place))["files"]
            listed |= {f"{place.name}/{name}" for name in (manifest.NAME, *names)}
    if "://" in url:
        results = {*buckets.remote(url).sizes()}
    else:
        files = (path for path in Path(url).rglob("*") if path.is_file())
        results = {path.relative_to(url).as_posix() for path in files}
    return len(results - listed)


def _write(file: Path, number: int) -> None:
    file.with_suffix(".new").write_text(str(number))
    file.with_suffix(".new").rename(file)


def _step(packed: Packed) -> int:
    (step,) = {int(value) for value in np.unique(packed.arrays["whole"])}
    return step


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    given = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        (Path(name) / "folder").mkdir()
        with buckets.with_bucket(Path(name), patch):
            for url in (f"{name}/folder", "s3://bucket/kills"):
                counts = kill_ranks(given.kills, given.seed, url, Path(name))
                text = ", ".join(f"{key} {value}" for key, value in counts.items())
                print(f"{'bucket' if '://' in url else 'folder'}: {text}", flush=True)
                failed |= counts["intact"] != counts["kills"]
                # A server may complete a request of a killed process after the next save.
                failed |= "://" not in url and counts["left over"] > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
