"""`python -m tests.budget`: no package outgrows its number of lines and files.

Part of `make lint`. The section `tfdist:budget` of `setup.cfg` has a line for each package and for
the modules beside them. A feature that needs room takes it from another line in the same commit;
`--write` lowers each line to what is there, and raises none.
"""

from __future__ import annotations

import argparse
import configparser
import re
import sys
from pathlib import Path

from tests.support import ROOT

_SETUP = ROOT / "setup.cfg"
_SECTION = "tfdist:budget"


def main() -> int:
    """Prints each package above its budget, and returns 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.budget")
    parser.add_argument("--write", action="store_true", help="lower the budget to today's sizes")
    write = parser.parse_args().write
    problems = []
    text, header, section = _SETUP.read_text().partition(f"[{_SECTION}]\n")
    allowed = budget()
    for package, (lines, files) in sizes(ROOT, list(allowed)).items():
        most_lines, most_files = allowed[package]
        if lines > most_lines or files > most_files:
            problems.append(
                f"{package} has {lines} lines in {files} files; its budget in setup.cfg is "
                f"{most_lines} in {most_files}. Remove as much as you add."
            )
        lowered = f"{package} = {min(lines, most_lines)} {min(files, most_files)}"
        section = re.sub(rf"^{package} = .*$", lowered, section, count=1, flags=re.MULTILINE)
    if write:
        _SETUP.write_text(text + header + section)
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return bool(problems)


def budget() -> dict[str, tuple[int, int]]:
    """Returns the most lines and files of each package, by its path."""
    parser = configparser.ConfigParser()
    parser.read(_SETUP)
    words = {package: value.split() for package, value in parser[_SECTION].items()}
    return {package: (int(lines), int(files)) for package, (lines, files) in words.items()}


def sizes(root: Path, packages: list[str]) -> dict[str, tuple[int, int]]:
    """Returns the lines and files of each package; files of a longer path belong to that alone."""
    counted = dict.fromkeys(packages, (0, 0))
    for file in {path for package in packages for path in (root / package).rglob("*.py")}:
        relative = file.relative_to(root).as_posix()
        owner = max((one for one in packages if relative.startswith(f"{one}/")), key=len)
        lines, files = counted[owner]
        counted[owner] = lines + len(file.read_text().splitlines()), files + 1
    return counted


if __name__ == "__main__":
    sys.exit(main())
