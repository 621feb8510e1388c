"""`python -m tfdist.doctor`: looks this machine over before a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jsonargparse import ActionYesNo

from tfdist.console import command
from tfdist.doctor import report
from tfdist.doctor.check import Check

_DESCRIPTION = "Checks the environment. Each failed check prints the command that fixes it."

#: The groups of lines, by title: the module that makes each. These import no TensorFlow until then.
GROUPS = {
    "versions": "versions",
    "devices": "devices",
    "processes": "processes",
    "host": "host",
    "all-reduce": "all_reduce",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for a red line, 130 for an interrupt."""
    return command.run(lambda: _doctor(arguments))


def _doctor(arguments: Sequence[str] | None) -> int:
    """Parses the command line and does what it says; returns the exit code."""
    parser = command.parser("python -m tfdist.doctor", _DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--all-reduce",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="time sums over the replicas of this host, or over the ranks that run this",
    )
    chosen = command.parse(parser, arguments)
    return int(not _examine(chosen.json, chosen.all_reduce))


def _examine(as_json: bool, all_reduce: bool) -> bool:
    """Runs all groups, prints their lines on rank 0, and tells whether none of them is red."""
    groups = {
        title: _lines(module)
        for title, module in GROUPS.items()
        if all_reduce or module != "all_reduce"
    }
    if _talks():
        if as_json:
            print(report.as_json(groups))
        else:
            report.show(groups)
    return report.healthy(groups)


def _lines(module: str) -> list[Check]:
    """The lines of a group. What nobody foresaw is a line too: the other groups still tell."""
    try:
        return importlib.import_module(f"tfdist.doctor.{module}").checks()
    except Exception as error:
        return [
            Check(module, f"{type(error).__name__}: {error}", "wrong", "report it with this text")
        ]


def _talks() -> bool:
    """Whether this process is rank 0, or nobody knows which it is."""
    from tfdist import cluster
    from tfdist.errors import ClusterError

    try:
        return cluster.is_chief()
    except ClusterError:
        return True


if __name__ == "__main__":
    sys.exit(main())
