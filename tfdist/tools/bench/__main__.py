"""`tfdist bench NAME`: the benchmarks, one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.tools.bench import harness

#: The module of each subcommand: it adds the flags (`add_arguments`) and runs (`run`). Importing it
#: does not import TensorFlow.
COMMANDS = {
    "all": "tfdist.tools.bench.run_all",
    "allreduce": "tfdist.tools.bench.allreduce",
    "device": "tfdist.tools.bench.device",
    "input": "tfdist.tools.bench.input",
    "scaling": "tfdist.tools.bench.scaling",
    "step": "tfdist.tools.bench.step",
    "sweep": "tfdist.tools.bench.sweep",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns the exit code: 0, 1 after an error, 130 after an interrupt."""
    return harness.run_one_of(
        COMMANDS, "tfdist bench", "Measures tfdist on this machine.", arguments
    )


if __name__ == "__main__":
    sys.exit(main())
