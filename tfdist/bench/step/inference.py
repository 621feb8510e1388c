"""Ways to evaluate and to predict, each as a function that measures one whole call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfdist.bench.step import by_hand
from tfdist.bench.step.contenders import Case, Clock, Measure, Sample
from tfdist.trainer import Trainer


def _of_calls(case: Case, evaluates: bool, makes: Trainer | keras.Model) -> Measure:
    """Measures calls of our or of Keras's `evaluate` or `predict`."""
    data = case.workload.data()
    call: Callable[..., Any] = makes.evaluate if evaluates else makes.predict

    def measure() -> Sample:
        clock = Clock()
        result = call(data, steps=case.num_steps, verbose=0)
        return clock.sample(case.num_steps, result[0] if evaluates else float(np.mean(result)))

    return measure


def _ours(evaluates: bool, case: Case) -> Measure:
    """`tfdist.Trainer.evaluate` or `predict`."""
    trainer = Trainer(case.workload.build_model, strategy=case.strategy)
    return _of_calls(case, evaluates, trainer)


def _by_keras(evaluates: bool, in_graph: bool, case: Case) -> Measure:
    """`keras.Model.evaluate` or `predict`, by itself or with `steps_per_execution`."""
    options = {"steps_per_execution": case.steps_per_execution} if in_graph else {}
    with case.scope():
        model = case.workload.build_model(**options)
    return _of_calls(case, evaluates, model)


def _by_hand(evaluates: bool, case: Case) -> Measure:
    """A loop written by hand for one device; see `by_hand`."""
    data, model = case.workload.data(), case.workload.build_model()
    loop = by_hand.evaluating(model) if evaluates else by_hand.predicting(model)

    def measure() -> Sample:
        clock = Clock()
        return clock.sample(case.num_steps, loop(iter(data), case.num_steps))

    return measure


def contenders(case: Case, evaluates: bool) -> dict[str, Callable[[Case], Measure]]:
    """Returns those that evaluate, or that predict, in the order of the table."""
    by_hand = {"by hand": functools.partial(_by_hand, evaluates)}
    return {
        "tfdist": functools.partial(_ours, evaluates),
        **(by_hand if case.strategy.num_replicas == 1 else {}),
        "Keras": functools.partial(_by_keras, evaluates, False),
        "Keras, in graph": functools.partial(_by_keras, evaluates, True),
    }
