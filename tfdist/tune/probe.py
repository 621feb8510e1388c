"""One try of a batch: a short training in a process of its own, which may die of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

#: What a process says that found no room: tfdist, TensorFlow, C++.
_WORDS = ("out of memory", "OOM when allocating", "ResourceExhausted", "bad_alloc", "MemoryError")


class Outcome(NamedTuple):
    """What came of a try.

    Attributes:
        fits: Whether it trained.
        is_memory: Whether it was memory that did not suffice.
        words: What came of it, in a line.
    """

    fits: bool
    is_memory: bool
    words: str


def probe(
    batch: int, training: Sequence[str], memory: int | None, steps: int, seconds: float
) -> Outcome:
    """Trains for some steps with a global batch.

    Args:
        batch: To try.
        training: Flags of `python -m tfdist.train`.
        memory: Its limit in MB; None: none.
        steps: To make: the optimizer's variables are there after the first.
        seconds: That it may take.
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
            return Outcome(False, False, f"took more than {seconds:g} s: give it more --seconds")
    if done.returncode == 0:
        return Outcome(True, False, "fits")
    if done.returncode == -signal.SIGKILL:  # Linux ends the process that takes most
        return Outcome(False, True, "no room: the system killed it")
    if done.returncode < 0 and memory is not None:  # oneDNN's kernels do so where memory ends
        return Outcome(False, True, f"no room: {signal.Signals(-done.returncode).name}")
    if any(word in done.stderr for word in _WORDS):
        return Outcome(False, True, "no room")
    return Outcome(False, False, _last_error(done.stderr) or f"exit code {done.returncode}")


def _last_error(text: str) -> str:
    """The line that says what was wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")
