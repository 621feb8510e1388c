"""Rewords jsonargparse's errors, which name keys and Python types, in terms of the command line."""

from __future__ import annotations

import difflib
import re

_KEY = re.compile(r'Parser key "([\w.-]+)": (.*)')
_CHOICE = re.compile(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)")
_NO_SUBCOMMAND = re.compile(r'expected "\w+" to be one of \{(.*)\}, but it was not provided\.')
_REQUIRED = re.compile(r"(.*are required: )(.*)")
#: Patterns of problems, and what to print instead.
_PROBLEMS = {
    r"Not of type \w+: (.*) does not conform to restriction v>=(.*)": r"a number from \2, got \1",
    r"Not of type \w+: (.*) does not conform to restriction v>(.*)": r"a number above \2, got \1",
    r"Not of type \w+: invalid literal for int\(\) with base 10: (.*)": r"an integer, got \1",
    r"Not of type \w+: could not convert string to float: (.*)": r"a number, got \1",
    r"Expected a <class 'int'>\. Got value: (.*)": r"an integer, got '\1'",
    r"Expected a <class 'float'>\. Got value: (.*)": r"a number, got '\1'",
}


def reworded(error: Exception, help_text: str) -> str:
    """Returns the message of a parser's error on one line.

    Args:
        error: The error.
        help_text: The help of the command, which contains its flags.
    """
    message = " ".join(str(error).split())
    if found := _REQUIRED.fullmatch(message):
        return found[1] + ", ".join(_argument(key, help_text) for key in found[2].split(", "))
    if found := _NO_SUBCOMMAND.fullmatch(message):
        return f"a subcommand is missing: expected one of {found[1].replace(',', ', ')}"
    if found := _CHOICE.fullmatch(message):
        return _invalid_choice(found[1], found[2].strip("'"), found[3].replace("'", ""))
    if not (found := _KEY.fullmatch(message)):
        return message
    for pattern, expected in _PROBLEMS.items():
        if problem := re.fullmatch(pattern, found[2]):
            return f"{_argument(found[1], help_text)}: expected {problem.expand(expected)}"
    return f"{_argument(found[1], help_text)}: {found[2]}"


def _invalid_choice(argument: str, given: str, choices: str) -> str:
    names = {name.lower(): name for name in choices.split(", ")}
    close = difflib.get_close_matches(given.lower(), names, n=1)
    hint = f". Did you mean {names[close[0]]}?" if close else ""
    return f"{argument}: expected one of {choices}, got {given!r}{hint}"


def _argument(key: str, help_text: str) -> str:
    """Returns the flag of a key such as `search.over`, or its name if it has no flag."""
    name = key.rpartition(".")[2]
    flag = "--" + name.replace("_", "-")
    return flag if re.search(rf"{flag}(?![\w-])", help_text) else name
