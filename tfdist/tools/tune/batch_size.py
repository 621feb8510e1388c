"""`tfdist tune batch-size`: finds the largest batch that fits into memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import folders, tables
from tfdist.errors import ConfigurationError, LaunchError
from tfdist.tools.tune.trial_process import last_error

DESCRIPTION = "finds the largest global batch that fits into memory, with a process for each trial"

#: Fraction to subtract from the largest batch, because the memory use of steps varies.
_MARGIN = 0.1
#: The search stops when the largest batch is known with this relative precision.
_PRECISION = 0.05
#: Error texts of tfdist, TensorFlow and C++ for a lack of memory.
_OUT_OF_MEMORY = (
    "out of memory", "OOM when allocating", "ResourceExhausted", "bad_alloc", "MemoryError",
)  # fmt: skip


class Outcome(NamedTuple):
    """The result of a trial.

    Attributes:
        fits: Whether training succeeded.
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
        LaunchError: The first batch does not fit, or training fails for another reason.
        ConfigurationError: The largest batch size is smaller than the first.
    """
    if most < first:
        raise ConfigurationError(f"--from {first} --most {most}: --most must be at least --from.")
    tried: list[tuple[int, Outcome]] = []

    def fits(batch: int) -> bool:
        outcome = try_batch(batch, training, memory, steps, seconds)
        tried.append((batch, outcome))
        tables.text(f"batch {batch}: {outcome.message}")
        if not outcome.fits and not outcome.out_of_memory and batch == first:
            raise LaunchError(f"training with a batch of {batch} fails: {outcome.message}")
        return outcome.fits

    largest_batch = largest(fits, first, most)
    if largest_batch == 0:
        raise LaunchError(
            f"a batch of {first} does not fit. Try --from 1, or estimate with tfdist "
            "plan memory which settings would fit."
        )
    errors = [o.message for _, o in tried if not o.fits and not o.out_of_memory]
    tables.facts(
        [
            ("largest batch that ran", str(largest_batch)),
            ("recommended, with a margin of 10%", f"--batch-size {recommended(largest_batch)}"),
            *[("search stopped by another error", message) for message in errors[:1]],
        ]
    )


def try_batch(
    batch: int, training: Sequence[str], memory: int | None, steps: int, seconds: float
) -> Outcome:
    """Trains for a few steps in a separate process, which may run out of memory."""
    with folders.temporary() as folder:
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
    if done.returncode == -signal.SIGKILL:  # Linux kills the process that uses most memory
        return Outcome(False, True, "out of memory: killed by the system")
    if done.returncode < 0 and memory is not None:  # oneDNN crashes at the limit
        return Outcome(False, True, f"out of memory: {signal.Signals(-done.returncode).name}")
    if any(word in done.stderr for word in _OUT_OF_MEMORY):
        return Outcome(False, True, "out of memory")
    return Outcome(False, False, last_error(done.stderr) or f"exit code {done.returncode}")


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Returns about the largest number that fits, found by doubling and bisecting.

    Args:
        fits: Returns whether a number fits. If it does not, larger numbers do not either.
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


def recommended(number: int) -> int:
    """Returns 90% of a batch size, rounded down to a multiple of 8, which kernels prefer."""
    reduced = max(1, int(number * (1 - _MARGIN)))
    return reduced - reduced % 8 if reduced > 8 else reduced
