"""Command lines of all commands: parsers, their help, and their errors in terms of flags.

jsonargparse's own messages name keys and Python types. Does not import TensorFlow.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter

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


def parser(program: str, description: str, **options: Any) -> ArgumentParser:
    """Returns an empty parser, which raises its errors; add arguments as in argparse."""
    return ArgumentParser(
        prog=program,
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
        formatter_class=_HelpFormatter,
        **options,
    )


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns a suggestion to append to a message, or an empty text if no word is similar."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def problem(
    error: Exception,
    parser: ArgumentParser,
    words: Sequence[str],
    *,
    program: str | None = None,
    suggest: Callable[[str, Iterable[str]], str] = did_you_mean,
) -> str:
    """Returns the message of a parser's error, with a suggestion for the first unknown flag.

    Args:
        error: The error.
        parser: The parser of the command or subcommand.
        words: The command line.
        program: Name of the command; None: the parser's.
        suggest: As `did_you_mean`.
    """
    # argparse also breaks lines after hyphens.
    help_text = re.sub(r"-\n\s+", "-", parser.format_help())
    flags = list(dict.fromkeys(re.findall(r"--[\w-]+", help_text)))
    given = (word.partition("=")[0] for word in itertools.takewhile("--".__ne__, words))
    unknown = [flag for flag in given if flag.startswith("--") and flag not in flags]
    hint = suggest(unknown[0], flags) if unknown else ""
    message = _reworded(error, help_text) + (f".{hint}" if hint else "")
    return f"{message}\n{program or parser.prog} --help lists the flags."


def _reworded(error: Exception, help_text: str) -> str:
    message = " ".join(str(error).split())
    if match := _REQUIRED.fullmatch(message):
        return match[1] + ", ".join(_argument(key, help_text) for key in match[2].split(", "))
    if match := _NO_SUBCOMMAND.fullmatch(message):
        return f"a subcommand is missing: expected one of {match[1].replace(',', ', ')}"
    if match := _CHOICE.fullmatch(message):
        choices, given = match[3].replace("'", ""), match[2].strip("'")
        names = {name.lower(): name for name in choices.split(", ")}
        close = difflib.get_close_matches(given.lower(), names, n=1)
        hint = f". Did you mean {names[close[0]]}?" if close else ""
        return f"{match[1]}: expected one of {choices}, got {given!r}{hint}"
    if not (match := _KEY.fullmatch(message)):
        return message
    for pattern, expected in _PROBLEMS.items():
        if problem := re.fullmatch(pattern, match[2]):
            return f"{_argument(match[1], help_text)}: expected {problem.expand(expected)}"
    return f"{_argument(match[1], help_text)}: {match[2]}"


def _argument(key: str, help_text: str) -> str:
    """Returns the flag of a key such as `search.over`, or its name if it has no flag."""
    name = key.rpartition(".")[2]
    flag = "--" + name.replace("_", "-")
    return flag if re.search(rf"{flag}(?![\w-])", help_text) else name


class _HelpFormatter(DefaultHelpFormatter):
    """jsonargparse's help without parts that are uninformative or wrong.

    These are types of Python, absent defaults, and `required` for arguments that may be absent.
    """

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        # The text may end with `(required, type: INT, default: 3)`, or some of these.
        ending = re.search(r"^(.*?)\s*\(([^()]*)\)$", text, flags=re.S)
        if not ending:
            return text
        words = re.sub(r"[][']", "", ending[2])  # lists without the punctuation of Python
        parts = [part for part in words.split(", ") if not part.startswith("type: ")]
        parts = [part for part in parts if part not in ("default: null", "default: False")]
        if action.nargs in ("*", "?"):
            parts = [part for part in parts if part != "required"]
        return f"{ending[1]} ({', '.join(parts)})" if parts else ending[1]
