"""Extracts shell commands from the code blocks of pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.support import ROOT

#: Launchers that start a command several times.
_STARTERS = re.compile(r"^(mpirun -np \d+|horovodrun --gloo -np \d+|srun --ntasks \d+) ")
_BLOCK = re.compile(r"^```(?:bash|sh|)\n(.*?)^```|((?:^ {4,}\S.*\n)+)", flags=re.M | re.S)


class Command(NamedTuple):
    """A command of ours, `python -m MODULE ...`, as a page shows it.

    Attributes:
        page: The page, relative to the checkout.
        starter: What stands before it, `mpirun -np 2`; or nothing.
        module: After `-m`.
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
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("docs", "tfdist", "pipelines", "notebooks", "benchmarks"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return [str(path.relative_to(ROOT)) for path in found]


def _of_page(page: str) -> Iterator[Command]:
    for fenced, indented in _BLOCK.findall((ROOT / page).read_text()):
        text = (fenced or indented).replace("\\\n", " ")
        for line in map(str.strip, text.splitlines()):
            starter = _STARTERS.match(line)
            rest = line[starter.end() :] if starter else line
            if not rest.startswith(
                ("python -m tfdist", "python -m pipelines", "python -m benchmarks")
            ):
                continue
            words = shlex.split(rest, comments=True)
            end = next((at for at, word in enumerate(words) if word in (">", "|")), len(words))
            _, _, module, *arguments = words[:end]
            yield Command(page, starter[1] if starter else "", module, tuple(arguments))
