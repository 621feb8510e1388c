"""`tfdist tune NAME`: finds good values of flags by trials, one subcommand each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command
from tfdist.errors import ConfigurationError

#: The module of each subcommand: it adds the flags (`add_arguments`) and runs (`run`). Importing it
#: does not import TensorFlow.
COMMANDS = {
    "batch-size": "tfdist.tools.tune.batch_size",
    "lr": "tfdist.tools.tune.learning_rate",
    "search": "tfdist.tools.tune.search",
}

_PROGRAM = "tfdist tune"
_DESCRIPTION = (
    "Finds the largest batch size, a learning rate, or the best values of any flags. Flags after "
    "-- are flags of python -m tfdist.train, and configure the training run."
)


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a subcommand and returns the exit code: 0, 1 after an error, 130 after an interrupt."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    end = words.index("--") if "--" in words else len(words)
    tune_arguments, training = words[:end], words[end + 1 :]
    try:
        command.run_one_of(
            COMMANDS, _PROGRAM, _DESCRIPTION, tune_arguments,
            lambda _, values: values.update(training=training),
        )  # fmt: skip
    except ConfigurationError as error:
        if training or not str(error).startswith("unrecognized arguments"):
            raise
        raise ConfigurationError(
            f"{error}\nWrite flags of python -m tfdist.train after --, as in -- --epochs 1."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
