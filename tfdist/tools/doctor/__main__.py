"""`tfdist doctor`: checks the environment before a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jsonargparse import ActionYesNo

from tfdist.console import command
from tfdist.errors import TfdistError
from tfdist.tools.doctor import report
from tfdist.tools.doctor.report import Check

_DESCRIPTION = "Checks the environment. Each failed check prints the command that fixes it."

#: The module and function of each group of checks. Importing them here would import TensorFlow.
GROUPS = {
    "versions": ("host", "library_checks"),
    "devices": ("devices", "checks"),
    "processes": ("processes", "checks"),
    "host": ("host", "checks"),
    "all-reduce": ("processes", "all_reduce_checks"),
}


@command.main
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 if a check failed, 130 after Ctrl-C."""
    parser = command.parser("tfdist doctor", _DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--all-reduce",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="measure all-reduce over the replicas of this host, or over the running ranks",
    )
    chosen = command.parse(parser, arguments)
    # Run all checks and print them on rank 0.
    groups = {
        title: _lines(title) for title in GROUPS if chosen.all_reduce or title != "all-reduce"
    }
    from tfdist import cluster
    from tfdist.errors import ClusterError

    try:
        is_chief = cluster.is_chief()
    except ClusterError:  # the rank is unknown
        is_chief = True
    if is_chief:
        if chosen.json:
            print(report.as_json(groups))
        else:
            report.show(groups)
    return int(not report.healthy(groups))


def _lines(title: str) -> list[Check]:
    """Returns the checks of a group; an unexpected error becomes a failed check."""
    module, function = GROUPS[title]
    try:
        return getattr(importlib.import_module(f"tfdist.tools.doctor.{module}"), function)()
    except TfdistError as error:
        return [Check(title, str(error), "wrong", "correct what the message names")]
    except Exception as error:
        return [Check(title, f"{type(error).__name__}: {error}", "wrong", "report this as a bug")]


if __name__ == "__main__":
    sys.exit(main())
