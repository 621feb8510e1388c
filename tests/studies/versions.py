"""`make versions`: runs tests with the versions of Python, TensorFlow and Keras that users have.

In an environment for each combination, which uv makes, it runs a training, a notebook, the quick
tests, the build of Horovod, and cases of the contract, and writes the table of `docs/versions.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

PAGE = ROOT / "docs" / "versions.md"
_TOOLS = ("pip", "pytest", "pytest-xdist", "nbmake", "hypothesis")
_UV = (sys.executable, "-m", "uv")  # `make versions` installs it beside this Python
#: The columns after those of the versions: whether it trains, and strategies that run cases.
COLUMNS = ("trains", "mirrored", "sharded parameters", "tensor_parallel", "pipeline",
           "multi_worker", "horovod")  # fmt: skip
#: The cases of each cell, but for every case in the first and the last row.
FEW = ("all-together", "embedding-clipped", "batch-norm")


class Combination(NamedTuple):
    """Versions to install: of Python, TensorFlow, Keras and NumPy, and how to choose the others."""

    python: str
    tensorflow: str
    keras: str
    numpy: str
    resolution: str = "highest"
    every_case: bool = False

    @property
    def name(self) -> str:
        return "-".join(self[:4])


COMBINATIONS = (
    Combination("3.11", "2.18.0", "3.8.0", "1.26.4", "lowest-direct", every_case=True),
    Combination("3.11", "2.18.1", "3.10.0", "2.0.2"),
    Combination("3.12", "2.19.1", "3.9.2", "2.0.2"),
    Combination("3.12", "2.19.1", "3.15.1", "2.1.3"),
    Combination("3.12", "2.20.0", "3.12.4", "2.2.6"),
    Combination("3.13", "2.20.0", "3.13.2", "2.3.5"),
    Combination("3.13", "2.21.0", "3.14.1", "2.4.0"),
    Combination("3.13", "2.21.0", "3.15.1", "2.5.5", every_case=True),
)


def main() -> int:
    """Tests each combination, and returns 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.versions", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions",
                        help="for the environments, which are created where missing")  # fmt: skip
    parser.add_argument("--only", default="", help="a regular expression: the combinations to test")
    parser.add_argument("--column", action="append", choices=COLUMNS,
                        help="measure only this one, and keep the row's other cells")  # fmt: skip
    arguments = parser.parse_args()
    failed = 0
    for combination in (one for one in COMBINATIONS if re.search(arguments.only, one.name)):
        python = environment(combination, arguments.folder)
        for column in arguments.column or COLUMNS:
            cell = measured(column, python, combination.every_case)
            failed += any(word in cell for word in ("fail", "wrong", "crash", "hang"))
            write_cell(combination, column, cell)
    return bool(failed)


def environment(combination: Combination, folder: Path) -> Path:
    """Returns the Python of an environment with these versions."""
    place = folder / combination.name
    python = place / "bin" / "python"
    if not (place / "bin" / "pytest").exists():  # installed last
        subprocess.run([*_UV, "venv", "--clear", "--python", combination.python, place], check=True)
        pinned = [f"{one}=={getattr(combination, one)}" for one in ("tensorflow", "keras", "numpy")]
        install = [*_UV, "pip", "install", "--python", str(python), "--resolution"]
        subprocess.run([*install, combination.resolution, *pinned], check=True)
        ours = [*install, combination.resolution, f"{ROOT}[tables]"]
        plan = subprocess.run([*ours, "--dry-run"], check=True, capture_output=True, text=True)
        if changed := re.findall(r"^ [-+~] (?:tensorflow|keras|numpy)==.*$", plan.stderr, re.M):
            raise SystemExit(f"{combination.name}: installing tfdist would change {changed}")
        subprocess.run(ours, check=True)
        subprocess.run([*install, "highest", *_TOOLS], check=True)
    return python


def measured(column: str, python: Path, every_case: bool) -> str:
    """Returns a cell of a combination's row: how the training ends, or the cases of a strategy."""

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", *map(str, command)], stdout=subprocess.PIPE, text=True, check=False,
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    if column == "trains":
        done = run("tfdist.train", "--smoke", "--strategy", "mirrored", "--run-dir", "build/smoke")
        parts = ["yes" if done.returncode == 0 else "fails"]
        for tests in (("-m", "", "notebooks/11_two_gpus_of_a_hosted_notebook.ipynb"),
                      ("-m", "quick", "-n", "auto", "--dist", "loadgroup", "tests")):  # fmt: skip
            last = run("pytest", "-q", *tests).stdout.strip().splitlines()[-1:]
            parts.append(re.sub(r" in .*", "", last[0]).strip("= ") if last else "fails")
        return ", ".join(parts)
    if column == "horovod" and run("tfdist", "install_horovod").returncode:
        return "fails to build"
    few = [word for case in FEW for word in ("--case", case)]
    chosen = ["--table", "compatibility"] if every_case else few
    done = run("tests.conformance", *chosen, "--replicas", 2, "--strategy", column, "--json")
    verdicts = Counter(one["status"] for one in json.loads(done.stdout))
    return ", ".join(f"{number} {status}" for status, number in verdicts.most_common())


def write_cell(combination: Combination, column: str, cell: str) -> None:
    """Replaces a cell of the combination's row in the table of the page."""
    start = f"| {' | '.join(combination[:4])} |"
    text = PAGE.read_text()
    (row,) = (line for line in text.splitlines() if line.startswith(start))
    cells = row.split("|")
    cells[5 + COLUMNS.index(column)] = f" {cell} "  # after an empty one and those of the versions
    PAGE.write_text(text.replace(row, "|".join(cells)))


if __name__ == "__main__":
    raise SystemExit(main())
