"""`python -m tfdist.bench NAME`: the benchmarks, one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command

#: Subcommands: the module that adds its flags (`add_arguments`) and runs it (`run`). These import
#: no TensorFlow until they run.
COMMANDS = {
    "all": "tfdist.bench.every.command",
    "allreduce": "tfdist.bench.allreduce.command",
    "checkpoint": "tfdist.bench.checkpoint.command",
    "input": "tfdist.bench.input.command",
    "large_batch": "tfdist.bench.large_batch.command",
    "memory": "tfdist.bench.memory.command",
    "pipeline": "tfdist.bench.pipeline.command",
    "precision": "tfdist.bench.precision.command",
    "scaling": "tfdist.bench.scaling.command",
    "start": "tfdist.bench.start.command",
    "step": "tfdist.bench.step.command",
    "strategies": "tfdist.bench.strategies.command",
    "sweep": "tfdist.bench.sweep.command",
    "unet": "tfdist.bench.unet.command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns the exit code: 0, 1 for an error, 130 for an interrupt."""
    return command.run(
        lambda: command.run_one_of(
            COMMANDS, "python -m tfdist.bench", "Measures tfdist.", arguments
        )
    )


if __name__ == "__main__":
    sys.exit(main())
