"""`make versions`: runs tests with the versions of Python, TensorFlow and Keras that users have.

Makes an environment for each combination with uv, outside of the project's own. In it runs the
quick tests, a training, and every case of the contract under the chosen strategies, and writes the
table of `docs/versions.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

_PAGE = ROOT / "docs" / "versions.md"
_TOOLS = ("pytest", "pytest-xdist", "nbmake", "hypothesis")


class Combination(NamedTuple):
    """Versions to install: of Python, TensorFlow, Keras and NumPy, and how to choose the others."""

    python: str
    tensorflow: str
    keras: str
    numpy: str
    resolution: str = "highest"

    @property
    def name(self) -> str:
        return "-".join(self[:4])


COMBINATIONS = (
    Combination("3.11", "2.18.0", "3.8.0", "1.26.4", "lowest-direct"),
    Combination("3.11", "2.18.1", "3.10.0", "2.0.2"),
    Combination("3.12", "2.19.1", "3.9.2", "2.1.3"),
    Combination("3.12", "2.19.1", "3.15.1", "2.0.2"),
    Combination("3.12", "2.20.0", "3.12.4", "2.2.6"),
    Combination("3.13", "2.20.0", "3.13.2", "2.3.5"),
    Combination("3.13", "2.21.0", "3.14.1", "2.4.0"),
    Combination("3.13", "2.21.0", "3.15.1", "2.4.0"),
)


def main() -> int:
    """Tests each combination, and returns 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.versions", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions",
                        help="for the environments, which are created where missing")  # fmt: skip
    parser.add_argument("--only", help="a regular expression that the combination has to contain")
    parser.add_argument("--strategy", nargs="+", default=["mirrored"], help="columns of the table")
    parser.add_argument("--conformance-only", action="store_true", help="run no quick tests")
    arguments = parser.parse_args()
    failed = 0
    for combination in COMBINATIONS:
        if arguments.only and not re.search(arguments.only, combination.name):
            continue
        python = environment(combination, arguments.folder)
        row = tested(python, arguments.strategy, quick=not arguments.conformance_only)
        failed += any(word in row for word in ("fail", "wrong", "crash", "hang"))
        write_row(combination, row)
        print(combination.name, row, flush=True)
    return bool(failed)


def environment(combination: Combination, folder: Path) -> Path:
    """Returns the Python of an environment with these versions."""
    place = folder / combination.name
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--quiet", "--python", combination.python, place], check=True)
        pinned = [f"{one}=={getattr(combination, one)}" for one in ("tensorflow", "keras", "numpy")]
        install = ["uv", "pip", "install", "--python", python, "--resolution"]
        subprocess.run([*install, combination.resolution, *pinned], check=True)
        ours = [*install, combination.resolution, f"{ROOT}[tables]"]
        plan = subprocess.run([*ours, "--dry-run"], check=True, capture_output=True, text=True)
        if changed := re.findall(r"^ [-+~] (?:tensorflow|keras|numpy)==.*$", plan.stderr, re.M):
            raise SystemExit(f"{combination.name}: installing tfdist would change {changed}")
        subprocess.run(ours, check=True)
        subprocess.run([*install, "highest", *_TOOLS], check=True)
    return python


def tested(python: Path, strategies: list[str], quick: bool) -> str:
    """Returns the cells of a combination's row: the training, and the cases of each strategy."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", *map(str, command)],
            cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip

    trained = run("tfdist.train", "--smoke", "--strategy", "mirrored", "--run-dir", "build/smoke")
    cells = ["yes" if trained.returncode == 0 else "fails"]
    if quick:
        done = run("pytest", "-q", "-m", "quick", "-n", "auto", "--dist", "loadgroup", "tests")
        summary = done.stdout.strip().splitlines()[-1:]
        cells[0] += ", " + (re.sub(r" in .*", "", summary[0]).strip("= ") if summary else "fails")
    for strategy in strategies:
        done = run("tests.conformance", "--table", "compatibility", "--replicas", 2,
                   "--strategy", strategy, "--json")  # fmt: skip
        verdicts = Counter(one["status"] for one in json.loads(done.stdout))
        cells.append(", ".join(f"{number} {status}" for status, number in verdicts.most_common()))
    return " | ".join(cells)


def write_row(combination: Combination, row: str) -> None:
    """Replaces or adds the combination's row in the table of the page."""
    text = _PAGE.read_text()
    start = f"| {' | '.join(combination[:4])} |"
    line = f"{start} {row} |\n"
    rows = [one for one in text.splitlines(keepends=True) if one.startswith(start)]
    if rows:
        text = text.replace(rows[0], line)
    else:
        end = text.index("\n\n", text.index("| Python |")) + 1
        text = text[:end] + line + text[end:]
    _PAGE.write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
