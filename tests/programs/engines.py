"""Who runs a program: plain Keras on one device, and tfdist."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from tests.conformance import feeds
from tests.conformance.engines import create_strategy, of_known_length
from tests.conformance.results import Result, collect
from tests.programs.program import Program
from tests.programs.programs import PROGRAMS


@functools.cache
def reference(name: str) -> Result:
    """What plain Keras on one device makes of a program."""
    return plain(PROGRAMS[name])


def plain(program: Program) -> Result:
    """What plain Keras on one device makes of it."""
    with _floatx(program.floatx):
        return _run(of_known_length(program), program.build())


def tfdist(program: Program, strategy: str, num_replicas: int) -> Result:
    """What a Trainer makes of it.

    Raises:
        tfdist.errors.TfdistError: it declines the program.
    """
    from tfdist import Trainer

    with _floatx(program.floatx):
        return _run(
            program,
            Trainer(
                program.build,
                strategy=create_strategy(strategy, num_replicas, program.batch_size),
                accumulate=program.accumulate,
                sync_batch_norm=program.sync_batch_norm,
            ),
        )


def _run(program: Program, runner: Any) -> Result:
    """Fits, evaluates and predicts by a model or a Trainer."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = feeds.fit_arguments(program)
        if callbacks := list(program.callbacks(Path(folder))):
            arguments["callbacks"] = callbacks
        history = program.train(runner, arguments)
        for own in ("loss_scale", "skipped_steps"):  # logged besides what Keras logs
            history.history.pop(own, None)
        evaluation: dict[str, float] = {}
        predicted: Any = []
        if not program.only_fit:
            evaluation = runner.evaluate(**feeds.evaluate_arguments(program))
            predicted = runner.predict(**feeds.predict_arguments(program))
    model = getattr(runner, "model", runner)
    result = collect(model, history, evaluation)
    predictions = {f"of predictions: {i}": v for i, v in enumerate(keras.tree.flatten(predicted))}
    return dataclasses.replace(result, weights=result.weights | predictions)


@contextmanager
def _floatx(name: str) -> Iterator[None]:
    """Lets Keras compute in a dtype."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
