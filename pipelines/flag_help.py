"""Formats the help of commands: jsonargparse's, in terms of the command line."""

from __future__ import annotations

import argparse
import re

from jsonargparse import DefaultHelpFormatter


class HelpFormatter(DefaultHelpFormatter):
    """Jsonargparse's help without parts that are uninformative or wrong.

    These are types of Python, absent defaults, and `required` for arguments that may be absent.
    """

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        # The text may end with `(required, type: INT, default: 3)`, or some of these.
        found = re.search(r"^(.*?)\s*\(([^()]*)\)$", text, flags=re.S)
        if not found:
            return text
        words = re.sub(r"[][']", "", found[2])  # lists without the punctuation of Python
        parts = [part for part in words.split(", ") if not _is_uninformative(part)]
        if action.nargs in ("*", "?"):
            parts = [part for part in parts if part != "required"]
        return f"{found[1]} ({', '.join(parts)})" if parts else found[1]


def _is_uninformative(part: str) -> bool:
    return part in ("default: null", "default: False") or part.startswith("type: ")
