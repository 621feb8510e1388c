"""`tfdist plan NAME`: predicts memory or scaling, or chooses a layout; one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command

#: The module of each subcommand: it adds the flags (`add_arguments`) and runs (`run`). Importing it
#: does not import TensorFlow.
COMMANDS = {
    "memory": "tfdist.tools.plan.memory",
    "scaling": "tfdist.tools.plan.scaling",
    "auto": "tfdist.tools.plan.auto",
}


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a subcommand and returns the exit code: 0, 1 after an error, 130 after an interrupt."""
    what = "Predicts the memory and the scaling of a training run, and chooses its layout."
    command.run_one_of(COMMANDS, "tfdist plan", what, arguments)


if __name__ == "__main__":
    sys.exit(main())
