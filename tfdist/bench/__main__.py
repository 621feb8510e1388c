"""`python -m tfdist.bench NAME`: the benchmarks, one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.bench import harness

#: The module of each subcommand: it adds the flags (`add_arguments`) and runs (`run`). Importing it
#: does not import TensorFlow.
COMMANDS = {
    "all": "tfdist.bench.run_all",
    "allreduce": "tfdist.bench.allreduce",
    "checkpoint": "tfdist.bench.checkpoint",
    "compare": "tfdist.bench.compare",
    "input": "tfdist.bench.input",
    "scaling": "tfdist.bench.scaling",
    "start": "tfdist.bench.start",
    "step": "tfdist.bench.step",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns the exit code: 0, 1 after an error, 130 after an interrupt."""
    return harness.run_one_of(
        COMMANDS, "python -m tfdist.bench", "Measures tfdist on this machine.", arguments
    )


if __name__ == "__main__":
    sys.exit(main())
