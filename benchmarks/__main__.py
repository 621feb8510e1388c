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
    "input": "benchmarks.input",
    "large_batch": "benchmarks.large_batch",
    "link": "benchmarks.link",
    "memory": "benchmarks.memory",
    "pack_parts": "benchmarks.pack_parts",
    "pipeline": "benchmarks.pipeline",
    "precision": "benchmarks.precision",
    "published": "benchmarks.published",
    "remote_pipeline": "benchmarks.remote_pipeline",
    "scaling": "benchmarks.scaling",
    "sequence": "benchmarks.sequence",
    "strategies": "benchmarks.strategies",
    "sweep": "benchmarks.sweep",
    "traffic": "benchmarks.traffic",
    "unet": "benchmarks.unet",
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
