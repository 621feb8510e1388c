"""`make versions`: runs tests with the versions of Python, TensorFlow and Keras that users have.

Makes an environment for each combination with uv, outside of the project's own. In it runs the
quick tests, the notebook for hosted notebooks, a training, the build of Horovod, and cases of the
contract under `STRATEGIES`, and writes the table of `docs/versions.md`.
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

from tests.conformance.cases import CASES
from tests.support import ROOT

_PAGE = ROOT / "docs" / "versions.md"
_TOOLS = ("pip", "pytest", "pytest-xdist", "nbmake", "hypothesis")
STRATEGIES = (
    "mirrored", "sharded parameters", "tensor_parallel", "pipeline", "multi_worker", "horovod",
)  # fmt: skip
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
    parser.add_argument("--only", help="a regular expression that the combination has to contain")
    arguments = parser.parse_args()
    failed = 0
    for combination in COMBINATIONS:
        if arguments.only and not re.search(arguments.only, combination.name):
            continue
        python = environment(combination, arguments.folder)
        row = tested(python, combination.every_case)
        failed += any(word in row for word in ("fail", "wrong", "crash", "hang"))
        write_row(combination, row)
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


def tested(python: Path, every_case: bool) -> str:
    """Returns the cells of a combination's row: the training, and the cases of each strategy."""

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", *map(str, command)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    trained = run("tfdist.train", "--smoke", "--strategy", "mirrored", "--run-dir", "build/smoke")
    cells = ["yes" if trained.returncode == 0 else "fails"]
    for tests in (("-m", "", "notebooks/11_two_gpus_of_a_hosted_notebook.ipynb"),
                  ("-m", "quick", "-n", "auto", "--dist", "loadgroup", "tests")):  # fmt: skip
        summary = run("pytest", "-q", *tests).stdout.strip().splitlines()[-1:]
        cells[0] += ", " + (re.sub(r" in .*", "", summary[0]).strip("= ") if summary else "fails")
    run("tfdist", "install_horovod")  # without it, the cases of horovod fail
    for strategy in STRATEGIES:
        cases = CASES if every_case else FEW
        chosen = [word for case in cases for word in ("--case", case)]
        done = run("tests.conformance", *chosen, "--replicas", 2, "--strategy", strategy, "--json")
        verdicts = Counter(one["status"] for one in json.loads(done.stdout))
        cells.append(", ".join(f"{number} {status}" for status, number in verdicts.most_common()))
    return " | ".join(cells)


def write_row(combination: Combination, row: str) -> None:
    """Replaces the combination's row in the table of the page."""
    start = f"| {' | '.join(combination[:4])} |"
    text, number = re.subn(
        f"^{re.escape(start)}.*$", f"{start} {row} |", _PAGE.read_text(), flags=re.M
    )
    if not number:
        raise SystemExit(f"{_PAGE} has no row {start}")
    _PAGE.write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
