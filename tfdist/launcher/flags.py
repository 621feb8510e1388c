"""Reads a command line of `python -m tfdist.launch`: flags, and the command that they are for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from tfdist.errors import ConfigurationError
from tfdist.launcher.flag_checks import check
from tfdist.launcher.options import Options
from tfdist.launcher.parser import PROGRAM, parser
from tfdist.launcher.plan import parse_hosts


def parse(arguments: Sequence[str]) -> Options:
    """Returns the options of a command line; `--help` prints and exits.

    Raises:
        ConfigurationError: A flag that does not fit, or flags that do not fit each other.
    """
    arguments = list(arguments)
    own, command = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, command = arguments[:at], arguments[at + 1 :]
    ours = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the word at its cursor
        importlib.import_module("argcomplete").autocomplete(ours)
    known, rest = ours.parse_known_args(own)
    if "--" in arguments and (rest or not command):
        wrong = f"{' '.join(rest)!r} before --" if rest else "nothing after --"
        raise ConfigurationError(f"{wrong}: expected {PROGRAM} [flags] -- COMMAND ...")
    if rest and not rest[0].startswith("-"):
        raise ConfigurationError(f"{' '.join(rest)!r}: a command stands after --.")
    flags = vars(known)
    flags["hosts"] = parse_hosts(known.hosts) if known.hosts else {}
    most = known.elastic[1] if known.elastic else 0
    flags["num_workers"] = known.num_workers or sum(flags["hosts"].values()) or most or 2
    flags["command"] = tuple(command) or (sys.executable, "-m", "tfdist.train", *rest)
    options = Options(**flags)
    check(options)
    return options
