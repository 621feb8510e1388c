"""`python -m tests.keras_own PATH`: Keras's own tests, trained through a tfdist Trainer.

PATH is the folder keras/src of a checkout of the installed version, or of the installation where
it brings its tests. Nothing is fetched. A test that fails by itself too is not applicable.
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
    """Prints what came of every test; returns 1 where one fails that is not known to."""
    parser = argparse.ArgumentParser(prog="python -m tests.keras_own", description=__doc__)
    parser.add_argument("path", type=Path, help="keras/src of a checkout of Keras")
    # The tests look at the variables of their models: replicas have to share them.
    parser.add_argument("--strategy", choices=["towers", "one_device"], default="towers")
    parser.add_argument("--replicas", type=int, default=2, help="default: 2")
    parser.add_argument("-k", default="", metavar="WORDS", help="only these, as pytest's -k")
    parser.add_argument("--all", action="store_true", help="list those not applicable, too")
    arguments = parser.parse_args()
    files = [str(file) for name in FILES for file in sorted(arguments.path.resolve().glob(name))]
    if not files:
        parser.error(f"{arguments.path} has none of {', '.join(FILES)}: give keras/src.")
    start_tensorflow()
    _stand_in_for_jax()
    sys.path.append(str(arguments.path.resolve().parent.parent))  # the checkout's conftest
    return _report(_ask(files, arguments), arguments.all)


def _stand_in_for_jax() -> None:
    """Lets the trainer's tests be read: they import JAX before they ask for the back end."""
    if importlib.util.find_spec("jax") is None:
        sys.modules["jax"] = types.ModuleType("jax")


def _ask(files: list[str], arguments: argparse.Namespace) -> dict:
    """Runs the tests through a Trainer, then those that fail without it."""
    from tests.keras_own.outcomes import FAILED, NOT_APPLICABLE, Outcome, Recorder
    from tests.keras_own.through import Through

    replicas = 1 if arguments.strategy == "one_device" else arguments.replicas
    through = Recorder(Through(arguments.strategy, replicas))
    root = str(arguments.path.resolve())
    options = ["-q", "--no-header", "--no-summary", "--tb=no", "--noconftest", "-c", "/dev/null"]
    options += ["--rootdir", root, "--import-mode=importlib", "-p", "no:cacheprovider"]
    options.append("--continue-on-collection-errors")
    pytest.main([*options, "-k", arguments.k, *files], plugins=[through])
    failed = {name for name, outcome in through.outcomes.items() if outcome.status == FAILED}
    alone = Recorder(None)
    if failed:
        pytest.main([*options, *(f"{root}/{name}" for name in failed)], plugins=[alone])
    for name in failed & alone.outcomes.keys():
        if alone.outcomes[name].status == FAILED:
            reason = f"fails without a Trainer too: {alone.outcomes[name].reason}"
            through.outcomes[name] = Outcome(NOT_APPLICABLE, reason)
    return through.outcomes


def _report(outcomes: dict, everything: bool) -> int:
    from tests.keras_own.known import reason_of
    from tests.keras_own.outcomes import FAILED, NOT_APPLICABLE

    counts = collections.Counter(outcome.status for outcome in outcomes.values())
    num_unknown = 0
    for name, outcome in outcomes.items():
        if outcome.status == FAILED or (everything and outcome.status == NOT_APPLICABLE):
            print(f"{outcome.status}: {name}\n    {outcome.reason}")
        if outcome.status == FAILED:
            known = reason_of(name, outcome.reason)
            num_unknown += known is None
            print(f"    {known or 'NOT KNOWN WHY'}")
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())), end="")
    print(f"; of the failed {num_unknown} for a reason that is not known")
    return int(num_unknown > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # some of the tests leave generators without an end in threads of TensorFlow
