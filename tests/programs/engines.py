"""Engines that run a program: plain Keras on one device, and tfdist."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras

from tests.conformance import feeds
from tests.conformance.engines import create_strategy, of_known_length
from tests.conformance.results import Result, collect, compare
from tests.programs.program import Program
from tests.programs.programs import PROGRAMS
from tests.support.training import computing_in
from tfdist import Trainer


@functools.cache
def reference(name: str) -> Result:
    """Returns the result of a program in plain Keras on one device."""
    return plain(PROGRAMS[name])


def plain(program: Program, eagerly: bool = False) -> Result:
    """Returns the result of a program in plain Keras on one device.

    Args:
        program: The program.
        eagerly: Whether Keras traces no graphs, which takes a third of the time for a few steps.
    """
    with computing_in(program.floatx):
        model = program.build()
        if eagerly:
            model.run_eagerly = True
        return _run(of_known_length(program), model)


def tfdist(program: Program, strategy: str, num_replicas: int, folder: str = "") -> Result:
    """Returns the result of a program with a Trainer.

    Args:
        program: The program.
        strategy: Name of a strategy, as in `tests.conformance.engines`.
        num_replicas: Number of devices of this process.
        folder: For the files of callbacks, the same for all workers; empty for a new one.

    Raises:
        tfdist.errors.TfdistError: If the Trainer refuses the program.
    """
    with computing_in(program.floatx):
        return _run(program, trainer(program, strategy, num_replicas), folder)


def trainer(program: Program, strategy: str, num_replicas: int) -> Trainer:
    """Returns a Trainer of a program. Its arguments are as in `tfdist`."""
    return Trainer(
        program.build,
        strategy=create_strategy(strategy, num_replicas, program.batch_size),
        accumulate=program.accumulate,
        sync_batch_norm=program.sync_batch_norm,
    )


def assert_equals_one_device(program: Program, eagerly: bool = False) -> None:
    """Asserts that two mirrored replicas train a program to the results of `plain`."""
    differences = compare(tfdist(program, "mirrored", 2), plain(program, eagerly), program)
    assert not differences, "\n".join(map(str, differences))


def _run(program: Program, runner: Any, folder: str = "") -> Result:
    """Fits, evaluates and predicts with a model or a Trainer."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        files = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = feeds.fit_arguments(program)
        if callbacks := list(program.callbacks(files)):
            arguments["callbacks"] = callbacks
        history = program.train(runner, arguments)
        for name in ("loss_scale", "skipped_steps"):  # metrics that Keras does not log
            history.history.pop(name, None)
        evaluation: dict[str, float] = {}
        predicted: Any = []
        if not program.only_fit:
            evaluation = runner.evaluate(**feeds.evaluate_arguments(program))
            predicted = runner.predict(**feeds.predict_arguments(program))
    model = getattr(runner, "model", runner)
    result = collect(model, history, evaluation)
    predictions = {f"of predictions: {i}": v for i, v in enumerate(keras.tree.flatten(predicted))}
    return dataclasses.replace(result, weights=result.weights | predictions)
