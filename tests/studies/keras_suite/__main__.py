"""`python -m tests.studies.keras_suite PATH`: runs Keras's test suite through a tfdist Trainer.

PATH is the folder keras/src of a checkout of the installed version, or of the installation if it
contains the tests. Nothing is downloaded. A test that also fails without tfdist is not applicable.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

from tests import start_tensorflow

FILES = ("trainers/trainer_test.py", "callbacks/*_test.py")


def main() -> int:
    """Prints the outcome of every test, and returns 1 if one fails for an unknown reason."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.keras_suite", description=__doc__
    )
    parser.add_argument("path", type=Path, help="keras/src of a checkout of Keras")
    # The tests inspect the variables of their models, so the replicas must share them.
    parser.add_argument("--strategy", choices=["towers", "one_device"], default="towers")
    parser.add_argument("--replicas", type=int, default=2, help="default: 2")
    parser.add_argument("-k", default="", metavar="WORDS", help="select tests, as in pytest -k")
    parser.add_argument("--all", action="store_true", help="also list inapplicable tests")
    arguments = parser.parse_args()
    files = [str(file) for name in FILES for file in sorted(arguments.path.resolve().glob(name))]
    if not files:
        parser.error(f"{arguments.path} has none of {', '.join(FILES)}: pass keras/src.")
    start_tensorflow()
    _stub_jax()
    sys.path.append(str(arguments.path.resolve().parent.parent))  # the checkout's conftest
    return _report(_run(files, arguments), arguments.all)


def _stub_jax() -> None:
    """Makes the trainer's tests importable: they import JAX before they check the backend."""
    if importlib.util.find_spec("jax") is None:
        sys.modules["jax"] = types.ModuleType("jax")


def _run(files: list[str], arguments: argparse.Namespace) -> dict:
    """Runs the tests through a Trainer, and those that fail again without it."""
    from tests.studies.keras_suite.outcomes import FAILED, NOT_APPLICABLE, Outcome, Recorder
    from tests.studies.keras_suite.redirect import Redirect

    replicas = 1 if arguments.strategy == "one_device" else arguments.replicas
    redirected = Recorder(Redirect(arguments.strategy, replicas))
    root = str(arguments.path.resolve())
    options = ["-q", "--no-header", "--no-summary", "--tb=no", "--noconftest", "-c", "/dev/null"]
    options += ["--rootdir", root, "--import-mode=importlib", "-p", "no:cacheprovider"]
    options.append("--continue-on-collection-errors")
    pytest.main([*options, "-k", arguments.k, *files], plugins=[redirected])
    failed = {name for name, outcome in redirected.outcomes.items() if outcome.status == FAILED}
    without_trainer = Recorder(None)
    if failed:
        pytest.main([*options, *(f"{root}/{name}" for name in failed)], plugins=[without_trainer])
    for name in failed & without_trainer.outcomes.keys():
        if without_trainer.outcomes[name].status == FAILED:
            reason = f"fails without a Trainer too: {without_trainer.outcomes[name].reason}"
            redirected.outcomes[name] = Outcome(NOT_APPLICABLE, reason)
    return redirected.outcomes


def _report(outcomes: dict, everything: bool) -> int:
    from tests.studies.keras_suite.outcomes import FAILED, NOT_APPLICABLE, reason_of

    counts = collections.Counter(outcome.status for outcome in outcomes.values())
    num_unknown = 0
    for name, outcome in outcomes.items():
        if outcome.status == FAILED or (everything and outcome.status == NOT_APPLICABLE):
            print(f"{outcome.status}: {name}\n    {outcome.reason}")
        if outcome.status == FAILED:
            known = reason_of(name, outcome.reason)
            num_unknown += known is None
            print(f"    {known or 'UNKNOWN REASON'}")
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())), end="")
    print(f"; {num_unknown} failed for an unknown reason")
    return int(num_unknown > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # some tests leave endless generators in TensorFlow's threads
