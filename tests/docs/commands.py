"""Extracts shell commands from the code blocks of pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.support import ROOT
from tfdist.__main__ import COMMANDS

#: Launchers that start a command several times, and variables of a command.
_STARTERS = re.compile(
    r"^(mpirun -np \d+|horovodrun --gloo -np \d+|srun --ntasks \d+|[A-Z_]+=\S+) "
)
_OURS = ("tfdist ", "python -m tfdist", "python -m pipelines", "python -m benchmarks")
#: Languages of fenced blocks with commands.
_SHELLS = ("", "bash", "sh")


class Command(NamedTuple):
    """A command of ours, `python -m MODULE ...` or `tfdist NAME ...`, as a page shows it.

    Attributes:
        page: The page, relative to the checkout.
        starter: What stands before it, `mpirun -np 2`; or nothing.
        module: After `-m`, or the module of `NAME`.
        arguments: The words behind that.
    """

    page: str
    starter: str
    module: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.starter} {self.module} {shlex.join(self.arguments)}"


def commands() -> list[Command]:
    """Returns every command of every page, without repetitions within a page."""
    return list(dict.fromkeys(one for page in _pages() for one in _of_page(page)))


def _pages() -> list[str]:
    results = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("docs", "tfdist", "pipelines", "notebooks", "benchmarks"):
        results += sorted((ROOT / folder).rglob("*.md"))
    return [str(path.relative_to(ROOT)) for path in results]


def _of_page(page: str) -> Iterator[Command]:
    for line in _lines(page):
        starter = _STARTERS.match(line)
        rest = line[starter.end() :] if starter else line
        if rest.startswith(_OURS):
            words = shlex.split(rest, comments=True)
            end = next((at for at, word in enumerate(words) if word in (">", "|")), len(words))
            if words[0] == "tfdist":
                module, arguments = COMMANDS[words[1]][0].removesuffix(".__main__"), words[2:end]
            else:
                module, arguments = words[2], words[3:end]
            yield Command(page, starter[1] if starter else "", module, tuple(arguments))


def other_lines() -> Iterator[tuple[str, str]]:
    """Yields the page and the text of each line in a shell block that runs another program."""
    for page in _pages():
        for line in _lines(page):
            if not _STARTERS.sub("", line).startswith(_OURS):
                yield page, line


def _lines(page: str) -> Iterator[str]:
    """Yields the lines of a page's shell blocks, fenced or indented; continued lines as one."""
    fence: str | None = None
    follows_block = True  # an indented line is code after an empty line or another line of code
    text = (ROOT / page).read_text()
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.match(r"\s*```(\S*)", line):
            fence, follows_block = (found[1] if fence is None else None), True
        elif fence is not None:
            if fence in _SHELLS and line.strip():
                yield line.strip()
        elif follows_block and re.match(r" {4,}\S", line):
            yield line.strip()
        else:
            follows_block = not line.strip()
