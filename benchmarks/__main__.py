"""`python -m benchmarks NAME`: studies and comparisons, one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.tools.bench import harness

#: The module of each subcommand: it adds the flags (`add_arguments`) and runs (`run`). Importing it
#: does not import TensorFlow.
COMMANDS = {
    "all": "benchmarks.run_all",
    "allreduce": "benchmarks.allreduce",
    "bucket": "benchmarks.bucket",
    "checkpoint": "benchmarks.checkpoint",
    "compare": "benchmarks.compare",
    "input": "benchmarks.input",
    "link": "benchmarks.link",
    "memory": "benchmarks.memory",
    "pipeline": "benchmarks.pipeline",
    "scaling": "benchmarks.scaling",
    "start": "benchmarks.start",
    "strategies": "benchmarks.strategies",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a study and returns the exit code: 0, 1 after an error, 130 after an interrupt."""
    return harness.run_one_of(
        COMMANDS,
        "python -m benchmarks",
        "Studies of tfdist and comparisons with other libraries.",
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
