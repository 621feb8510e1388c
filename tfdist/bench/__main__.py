"""`python -m tfdist.bench NAME`: the benchmarks, one subcommand each."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from tfdist.errors import ConfigurationError
from tfdist.run import flags

#: Subcommands: the module that adds its flags (`add_arguments`) and runs it (`run`). These import
#: no TensorFlow until they run.
COMMANDS = {
    "allreduce": "tfdist.bench.allreduce.command",
    "input": "tfdist.bench.input.command",
    "scaling": "tfdist.bench.scaling.command",
    "step": "tfdist.bench.step.command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns the exit code: 0, 1 for an error, 130 for an interrupt."""
    # What matters is raised as well; the rest are pages about drivers that a machine lacks.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return flags.run(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> None:
    """Parses a command line and runs what it names."""
    parser = _parser("python -m tfdist.bench", "Measures tfdist.")
    subcommands = parser.add_subcommands(dest="benchmark")
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        parts = _parser(f"{parser.prog} {name}", module.DESCRIPTION)
        module.add_arguments(parts)
        subcommands.add_subcommand(name, parts, help=module.DESCRIPTION)
    try:
        chosen = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        message = " ".join(str(error).split())
        raise ConfigurationError(f"{message}\n{parser.prog} --help lists what there is.") from None
    importlib.import_module(COMMANDS[chosen.benchmark]).run(**chosen[chosen.benchmark].as_dict())


def _parser(program: str, description: str) -> ArgumentParser:
    return ArgumentParser(
        prog=program,
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
    )


if __name__ == "__main__":
    sys.exit(main())
