"""`python -m tfdist.tune NAME`: finds what fits, and what trains, by trying; a subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command

#: Subcommands: the module that adds its flags (`add_arguments`) and runs it (`run`). These import
#: no TensorFlow until they run.
COMMANDS = {"batch-size": "tfdist.tune.batch_size", "lr": "tfdist.tune.learning_rate"}

_PROGRAM = "python -m tfdist.tune"
_DESCRIPTION = (
    "Finds a batch size or a learning rate. What stands behind -- are flags of python -m "
    "tfdist.train: they say what is trained."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code: 0, 1 for an error, 130 for an interrupt."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    end = words.index("--") if "--" in words else len(words)
    own, training = words[:end], words[end + 1 :]
    return command.run(
        lambda: command.run_one_of(COMMANDS, _PROGRAM, _DESCRIPTION, own, training=training)
    )


if __name__ == "__main__":
    sys.exit(main())
