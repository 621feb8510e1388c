"""`python -m tfdist.tune batch-size`: finds the largest batch that fits into memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import tables
from tfdist.errors import LaunchError
from tfdist.tune.trial_process import last_error

DESCRIPTION = "the largest global batch that fits into memory, with a process for each trial"

#: Part of the largest batch that the advice leaves out, since steps differ in memory.
_MARGIN = 0.1
#: The search stops when what fits and what does not are this close, relative to the former.
_PRECISION = 0.05
#: What a process without enough memory prints: tfdist, TensorFlow and C++.
_OUT_OF_MEMORY = (
    "out of memory", "OOM when allocating", "ResourceExhausted", "bad_alloc", "MemoryError",
)  # fmt: skip


class Outcome(NamedTuple):
    """The result of a trial.

    Attributes:
        fits: Whether the training ran.
        out_of_memory: Whether it failed for lack of memory.
        message: The result in one line.
    """

    fits: bool
    out_of_memory: bool
    message: str


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--from", type=PositiveInt, default=8, metavar="N", dest="first", help="first batch size"
    )
    parser.add_argument(
        "--most", type=PositiveInt, default=1 << 16, metavar="N", help="largest batch size to try"
    )
    parser.add_argument(
        "--memory", type=PositiveInt, metavar="MB",
        help="memory limit of each GPU, or of the process without GPUs (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=PositiveInt, default=3, metavar="N",
        help="steps of a trial; at least 2, since the first one creates the optimizer's variables",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=PositiveInt, default=600, metavar="N", help="time limit of a trial"
    )


def run(
    first: int, most: int, memory: int | None, steps: int, seconds: int, training: Sequence[str]
) -> None:
    """Searches and prints the result; the arguments are the values of the flags.

    Raises:
        LaunchError: The first batch does not fit, or the training fails for another reason.
    """
    tried: list[tuple[int, Outcome]] = []

    def fits(batch: int) -> bool:
        outcome = try_batch(batch, training, memory, steps, seconds)
        tried.append((batch, outcome))
        tables.text(f"batch {batch}: {outcome.message}")
        if not outcome.fits and not outcome.out_of_memory and batch == first:
            raise LaunchError(f"training with a batch of {batch} fails: {outcome.message}")
        return outcome.fits

    found = largest(fits, first, most)
    if found == 0:
        raise LaunchError(
            f"a batch of {first} does not fit. Try --from 1, or plan with python -m tfdist.plan "
            "memory what would fit."
        )
    others = [one.message for _, one in tried if not one.fits and not one.out_of_memory]
    tables.facts(
        [
            ("largest batch that ran", str(found)),
            ("recommended, with a margin of 10 %", f"--batch-size {with_margin(found)}"),
            *[("search ended by another error", message) for message in others[:1]],
        ]
    )


def try_batch(
    batch: int, training: Sequence[str], memory: int | None, steps: int, seconds: float
) -> Outcome:
    """Trains for some steps in a process of its own, which may run out of memory.

    Args:
        batch: Global batch size.
        training: Flags of `python -m tfdist.train`.
        memory: Memory limit in MB, or None.
        steps: Number of steps.
        seconds: Time limit.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        command = [
            sys.executable, "-m", "tfdist.train", *training, "--batch-size", str(batch),
            "--limit-steps", str(steps), "--epochs", "1", "--checkpoint-every", "never",
            "--verbose", "0", "--run-dir", f"{folder}/run",
        ]  # fmt: skip
        if memory is not None:
            command += ["--memory", str(memory)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, False, f"took longer than {seconds:g} s. Increase --seconds")
    if done.returncode == 0:
        return Outcome(True, False, "fits")
    if done.returncode == -signal.SIGKILL:  # sent by Linux to the process with most memory
        return Outcome(False, True, "out of memory: killed by the system")
    if done.returncode < 0 and memory is not None:  # kernels of oneDNN crash at the limit
        return Outcome(False, True, f"out of memory: {signal.Signals(-done.returncode).name}")
    if any(word in done.stderr for word in _OUT_OF_MEMORY):
        return Outcome(False, True, "out of memory")
    return Outcome(False, False, last_error(done.stderr) or f"exit code {done.returncode}")


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Returns about the largest number that fits, found by doubling and bisecting.

    Args:
        fits: Tries a number; if one does not fit, no larger one does.
        first: The first number to try.
        most: The largest number to try.

    Returns:
        A number that was tried, within 5 % of the largest; 0 if `first` does not fit.
    """
    low, high = 0, min(first, most)
    while fits(high):
        if high == most:
            return high
        low, high = high, min(2 * high, most)
    while low and high - low > max(1, low * _PRECISION):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def with_margin(number: int) -> int:
    """Returns 90 % of a number, rounded down to a multiple of 8, which kernels prefer."""
    less = max(1, int(number * (1 - _MARGIN)))
    return less - less % 8 if less > 8 else less
