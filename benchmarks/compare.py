"""`python -m benchmarks compare BASE`: checks whether a change made tfdist faster or slower.

It measures this tree and a git worktree of the commit BASE in turns, each measurement in a new
process. It compares processor time, which depends less on other load than wall-clock time. The
verdict of each row follows from the confidence interval of the mean ratio of times within a round
(Student's t on the logarithms).
"""

from __future__ import annotations

import contextlib
import functools
import json as json_format
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser

from tfdist.cluster.launcher.processes import signals_raise
from tfdist.config import default_data_dir
from tfdist.console import folders
from tfdist.errors import ConfigurationError, LaunchError
from tfdist.tools.bench import harness

DESCRIPTION = "compares step, first step and input of this tree with another commit"

WHAT = ("step", "start", "input")
BASE, CHANGE = "base", "this tree"
CONFIDENCE = 0.95
#: Relative differences below this count as equal, regardless of the confidence interval.
_NEGLIGIBLE = 0.01
_SMOKE_ROUNDS, _SMOKE_IMAGES = 2, 96
_NUM_IMAGES = 960
_TIMEOUT_SECONDS = 900
_NOTE = (
    "Median processor time in seconds, with quartiles in brackets. 'ratio': the mean ratio of this "
    f"tree's time to the base's, with its {CONFIDENCE:.0%} confidence interval in brackets. A row "
    f"is equal if that contains 1, or if the difference is below {_NEGLIGIBLE:.0%}."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("base", metavar="BASE", help="commit, branch or tag to compare with")
    parser.add_argument(
        "--what", nargs="+", choices=list(WHAT), default=list(WHAT), help="what to measure"
    )
    parser.add_argument(
        "--data-dir", default=default_data_dir(), metavar="DIR",
        help="folder for the generated images of input",
    )  # fmt: skip
    harness.add_arguments(parser, rounds=10)


def run(
    base: str, what: Sequence[str], data_dir: str, rounds: int, output: harness.Output, smoke: bool
) -> None:
    """Measures both trees and prints a verdict for each row; the arguments are the flags' values.

    Raises:
        ConfigurationError: This is not a git checkout, the commit does not exist, or `rounds` is 1.
        LaunchError: A measurement failed.
    """
    if smoke:
        rounds = _SMOKE_ROUNDS
    if rounds < 2:
        raise ConfigurationError(
            "--rounds 1: expected at least 2, which a confidence interval needs."
        )
    here = Path(__file__).resolve().parents[1]
    images = ""
    if "input" in what:
        from tfdist.tools.bench import photographs

        number = _SMOKE_IMAGES if smoke else _NUM_IMAGES
        images = str(photographs.create(Path(data_dir) / "bench", number).shards)
    results = []
    with worktree(here, base) as there:
        for name in what:
            results += measure({BASE: there, CHANGE: here}, name, images, rounds, smoke)
    output.show(
        ("", BASE, CHANGE, "ratio", "verdict"),
        [_cells(result) for result in results],
        f"processor time of {base} and of this tree, {rounds} rounds",
    )
    output.conclude(results, _NOTE)


def measure(
    trees: dict[str, Path], what: str, images: str, num_rounds: int, smoke: bool
) -> list[dict[str, Any]]:
    """Measures both trees in turns.

    Args:
        trees: The checkouts `BASE` and `CHANGE`.
        what: One of `WHAT`.
        images: Folder of shards for "input".
        num_rounds: Measurements of each tree.
        smoke: Whether to use tiny sizes.

    Returns:
        A dict for each measured quantity, with its name, times, ratio and verdict.
    """
    ask = {
        name: functools.partial(_measured, tree, what, images, smoke)
        for name, tree in trees.items()
    }
    samples = harness.run_in_turns(ask, num_rounds)
    return [
        judge(
            quantity,
            [sample[quantity] for sample in samples[BASE]],
            [sample[quantity] for sample in samples[CHANGE]],
        )
        for quantity in samples[BASE][0]
    ]


def judge(quantity: str, base: Sequence[float], change: Sequence[float]) -> dict[str, Any]:
    """Returns the mean ratio of a quantity with its confidence interval, and the verdict.

    Args:
        quantity: Name of the quantity.
        base: Seconds of the base, by round.
        change: Seconds of this tree, by round.
    """
    from scipy import stats

    logs = np.log(np.array(change) / np.array(base))
    low, high = np.exp(stats.ttest_1samp(logs, 0.0).confidence_interval(CONFIDENCE))
    ratio = float(np.exp(np.mean(logs)))
    verdict = "equal"
    if abs(ratio - 1) >= _NEGLIGIBLE:
        verdict = "faster" if high < 1 else "slower" if low > 1 else "equal"
    return {
        "quantity": quantity,
        "base_s": harness.spread(base),
        "change_s": harness.spread(change),
        "ratio": {"median": ratio, "low": float(low), "high": float(high)},
        "verdict": verdict,
        "samples": {BASE: list(base), CHANGE: list(change)},
    }


@contextlib.contextmanager
def worktree(repository: Path, commit: str) -> Iterator[Path]:
    """Checks out a commit into a temporary folder, which is removed even after a signal.

    Raises:
        ConfigurationError: This is not a git checkout, or the commit does not exist.
    """
    with signals_raise(), folders.temporary("tfdist-compare-") as folder:
        tree = Path(folder) / "base"
        _git(repository, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            yield tree
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))


def _git(repository: Path, *words: str) -> None:
    done = subprocess.run(
        ["git", "-C", str(repository), *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigurationError(f"git {' '.join(words)}: {why[0]}")


def _measured(tree: Path, what: str, images: str, smoke: bool) -> dict[str, float]:
    """Runs `one_measurement.py` of this tree with the packages of another tree."""
    script = Path(__file__).with_name("one_measurement.py")
    done = subprocess.run(
        [sys.executable, str(script), what, images, "smoke" if smoke else ""],
        env=os.environ | {"PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=tree, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LaunchError(f"{what} of {tree} failed: {done.stderr.strip()[-1000:]}")
    return json_format.loads(done.stdout.splitlines()[-1])


def _cells(result: dict[str, Any]) -> list[str]:
    times = [harness.as_text(result[name], ".4g") for name in ("base_s", "change_s")]
    return [result["quantity"], *times, harness.as_text(result["ratio"], ".3f"), result["verdict"]]
