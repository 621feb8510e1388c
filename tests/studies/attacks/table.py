"""The table of attacks: what is done, what is expected, and what was seen."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import tfdist
from tests.studies.attacks import workers
from tests.support import ROOT


class Row(NamedTuple):
    """An attack with its outcome."""

    attack: str
    expected: str
    seen: str
    passed: bool


#: Attacks that other tests make: what is expected, and the tests, by attack.
TESTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "the loss becomes NaN": (
        "a warning or an error that names step and weight",
        ("tests/loops/test_observers.py",),
    ),
    "all checkpoints are damaged": (
        "an error that names them; nothing is overwritten",
        ("tests/checkpoint/test_store.py", "tests/run/test_resuming.py"),
    ),
    "two runs use one run folder": (
        "the second is refused; the lock of a killed run is taken over",
        ("tests/checkpoint/test_store.py",),
    ),
    "a shard vanishes or is damaged while it is read": (
        "an error that names the file, and the process ends",
        ("tests/pipelines/reading/test_corrupt.py",),
    ),
    "index.json lists paths outside of the folder, or shards twice": (
        "refused or reported",
        ("tests/pipelines/reading/test_read.py", "tests/pipelines/index", "tests/pipelines/verify"),
    ),
    "YAML with Python objects on the command line": (
        "an error of one line",
        ("tests/run/test_flags.py",),
    ),
    "ranks save and print without a guard": (
        "the chief writes and prints, the others wait",
        ("tests/processes/test_saving.py",),
    ),
    "strangers and unsigned messages at the rendezvous": (
        "sent away; escape sequences are not printed",
        ("tests/cluster/test_rendezvous.py", "tests/cluster/watchdog/test_simulated.py"),
    ),
    "hostile names in launchers' scripts": (
        "refused or quoted",
        ("tests/cluster/launcher/test_manifests.py",),
    ),
}


def of_workers(strategy: str) -> Iterator[Row]:
    """Yields the attacks of one of two workers on the other."""
    seen = tfdist.notebook_launch(functools.partial(workers.run, strategy), num_workers=2)
    for name, expected in workers.EXPECTED.items():
        passed = re.search(expected, seen[name]) is not None
        yield Row(f"{strategy}: rank 1 {name}", expected, seen[name], passed)


def of_tests(folder: Path) -> Iterator[Row]:
    """Yields the attacks that other tests make."""
    for attack, (expected, tests) in TESTS.items():
        passed, seen = _outcome(tests, folder / "report.xml")
        yield Row(attack, expected, seen, passed)


def _outcome(tests: Sequence[str], report: Path) -> tuple[bool, str]:
    """Runs tests, and returns whether all passed, and how many.

    Args:
        tests: Files and folders.
        report: Where pytest writes its report. That of an earlier run must not count as this one's.
    """
    report.unlink(missing_ok=True)
    command = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", "--junitxml", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command, *tests],
        cwd=ROOT, timeout=900, check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if not report.exists():
        return False, f"pytest exited with {done.returncode} before it ran a test"
    (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = count["failures"] + count["errors"]
    num_passed = count["tests"] - wrong - count["skipped"]
    seen = f"{num_passed} of {count['tests']} tests passed"
    if wrong:
        seen += f", not {_first_failed(suite)}"
    return done.returncode == 0 and num_passed > 0, seen


def _first_failed(suite: xml.etree.ElementTree.Element) -> str:
    """Returns the name of the first test of a report of pytest that failed."""
    return next(
        str(case.get("name"))
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    )
