"""`python -m tfdist.plan NAME`: what a training will take, one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command

#: Subcommands: the module that adds its flags (`add_arguments`) and runs it (`run`). These import
#: no TensorFlow until they run.
COMMANDS = {
    "memory": "tfdist.plan.memory.command",
    "scaling": "tfdist.plan.scaling.command",
    "memory-check": "tfdist.plan.memory.check_command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code: 0, 1 for an error, 130 for an interrupt."""
    return command.run(
        lambda: command.run_one_of(
            COMMANDS, "python -m tfdist.plan", "What a training will take.", arguments
        )
    )


if __name__ == "__main__":
    sys.exit(main())
