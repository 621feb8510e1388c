"""`python -m benchmarks all`: runs every study. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.tools.bench import run_all

DESCRIPTION = "every study, one after the other, each in a process of its own"

add_arguments = run_all.add_arguments


def run(only: Sequence[str] | None, folder: str, smoke: bool) -> None:
    """Runs the studies and prints a summary; the arguments are the values of the flags.

    Raises:
        ConfigurationError: There is no study of this name.
        LaunchError: A study failed; the others ran.
    """
    from benchmarks.__main__ import COMMANDS

    run_all.run_each("benchmarks", COMMANDS, only, folder, smoke)
