"""`python -m tfdist.tune NAME`: finds good values of flags by trials, one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command

#: The module of each subcommand: it adds the flags (`add_arguments`) and runs (`run`). Importing it
#: does not import TensorFlow.
COMMANDS = {
    "batch-size": "tfdist.tune.batch_size",
    "lr": "tfdist.tune.learning_rate",
    "search": "tfdist.tune.search",
}

_PROGRAM = "python -m tfdist.tune"
_DESCRIPTION = (
    "Finds the largest batch size, a learning rate, or the best values of any flags. Flags after "
    "-- are flags of python -m tfdist.train, and configure the training run."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code: 0, 1 after an error, 130 after an interrupt."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    end = words.index("--") if "--" in words else len(words)
    tune_arguments, training = words[:end], words[end + 1 :]
    return command.run(
        lambda: command.run_one_of(
            COMMANDS, _PROGRAM, _DESCRIPTION, tune_arguments, training=training
        )
    )


if __name__ == "__main__":
    sys.exit(main())
