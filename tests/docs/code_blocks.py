"""Python blocks of pages: where they are, and whether and how a test runs them.

An HTML comment above a block, which readers do not see, says what a test needs to know:

* `<!-- not run: REASON -->`: the block cannot run in a test.
* `<!-- run before: CODE -->`: code that defines what the block takes for granted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

#: The page whose first block defines the names that all examples use.
API = ROOT / "docs/api.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)
_COMMENT = re.compile(r"<!-- (not run|run before):\s((?:(?!-->).)*?)\s-->\s*\Z", flags=re.S)


class Block(NamedTuple):
    """A Python block of a page.

    Attributes:
        code: The code, as the page shows it.
        line: The line of the page on which the code begins.
        before: Code to run first.
        reason: Why the block is not run; empty if it is.
    """

    code: str
    line: int
    before: str = ""
    reason: str = ""


def blocks(page: Path) -> list[Block]:
    """Returns the Python blocks of a page, in order."""
    text = page.read_text()
    return [_block(text, found) for found in _BLOCK.finditer(text)]


def num_to_run(page: Path) -> int:
    """Returns the number of blocks of a page that a test runs."""
    return sum(not block.reason for block in blocks(page))


def _block(text: str, found: re.Match[str]) -> Block:
    line = text[: found.start()].count("\n") + 2
    comment = _COMMENT.search(text[: found.start()])
    if comment is None:
        return Block(found[1], line)
    kind, words = comment.groups()
    return Block(found[1], line, *((words, "") if kind == "run before" else ("", words)))


def common_names() -> str:
    """Returns the code that defines the names which all examples may use."""
    return blocks(API)[0].code
