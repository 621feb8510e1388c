"""Who trains a case: plain Keras on one device, plain Keras mirrored, tfdist."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tests.conformance import feeds
from tests.conformance.case import Case
from tests.conformance.cases import CASES

BOUND = 4e-5

# tfdist's strategies of one process, each with how many replicas.
STRATEGIES = [("one_device", 1)] + [
    (name, num_replicas)
    for name in ("mirrored", "central_storage", "towers")
    for num_replicas in (2, 3)
]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training run left behind: everything that an engine has to get right."""

    weights: dict[str, np.ndarray]
    history: dict[str, list[float]]
    evaluation: dict[str, float]
    iterations: int
    loss_scale: float | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """One number of a result that is not the reference's.

    Attributes:
        what: which number.
        size: by how much it is off; infinite where there is no such number.
        times: how many times the tolerated difference that is.
    """

    what: str
    size: float
    times: float

    def __str__(self) -> str:
        return f"{self.what}: off by {self.size:.2g}, {self.times:.3g} times what is tolerated"


def compare(result: Result, reference: Result, case: Case) -> list[Difference]:
    """Where a result is not the reference's, the worst first.

    Weights, history, evaluation and loss scale may be off by `BOUND * (1 + |reference|)`, times
    the case's tolerance. Counts of steps may not be off.
    """
    differences = [
        _difference(f"weight {path}", result.weights.get(path), value, case.tolerance)
        for path, value in reference.weights.items()
    ]
    for kind in ("history", "evaluation"):
        found, wanted = getattr(result, kind), getattr(reference, kind)
        differences += [
            _difference(f"{kind} {name}", found.get(name), wanted.get(name), case.tolerance)
            for name in sorted(found.keys() | wanted.keys())
        ]
    if reference.loss_scale is not None:
        differences.append(_difference("loss scale", result.loss_scale, reference.loss_scale, 1.0))
    steps = abs(result.iterations - reference.iterations)
    differences.append(Difference("optimizer steps", steps, np.inf if steps else 0.0))
    return sorted((d for d in differences if d.times > 1.0), key=lambda d: -d.times)


def _difference(what: str, found: object, wanted: object, tolerance: float) -> Difference:
    if found is None or wanted is None or np.shape(found) != np.shape(wanted):
        return Difference(f"{what}: {np.shape(found)} for {np.shape(wanted)}", np.inf, np.inf)
    a, b = np.asarray(found, "float64"), np.asarray(wanted, "float64")
    # A NaN is right where the reference has one, and infinitely wrong anywhere else.
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.nan_to_num(error, nan=np.inf)
    times = error / (tolerance * BOUND * (1.0 + np.abs(np.nan_to_num(b))))
    return Difference(what, float(np.max(error, initial=0)), float(np.max(times, initial=0)))


def collect(model: keras.Model, history: keras.callbacks.History, evaluation: dict) -> Result:
    """Reads a trained model and its logs."""
    scale = getattr(model.optimizer, "dynamic_scale", None)
    # Keras numbers the names of layers through a process: the position tells weights apart.
    weights = {f"{i} {w.name}": np.asarray(w.value) for i, w in enumerate(model.weights)}
    return Result(
        weights,
        {name: [float(v) for v in values] for name, values in history.history.items()},
        {name: float(value) for name, value in evaluation.items()},
        int(np.asarray(model.optimizer.iterations.value)),
        None if scale is None else float(np.asarray(scale.value)),
    )


def _keras_fit(case: Case, evaluated: Sequence[Case], model: keras.Model) -> list[Result]:
    """Plain Keras, under whichever strategy's scope this is called in: fit once, then evaluate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(**feeds.fit_arguments(case))
        return [
            collect(model, history, model.evaluate(**feeds.evaluate_arguments(other)))
            for other in evaluated
        ]


def one_device(case: Case, *evaluated: Case) -> list[Result]:
    """Plain Keras on one device: trains a case, then evaluates each of the others.

    Data of unknown length is given as data of known length: on the former Keras counts a step too
    many in every epoch, on one device too.
    """
    feed = "dataset" if case.feed == "unknown length" else case.feed
    known, *others = (dataclasses.replace(c, feed=feed) for c in (case, *evaluated))
    return _keras_fit(known, others, case.build())


@functools.cache
def _references(name: str) -> list[Result]:
    return one_device(CASES[name], CASES[name], feeds.half_lost(CASES[name]))


def reference(name: str) -> Result:
    """The right answer of a case."""
    return _references(name)[0]


def half_evaluated(name: str) -> Result:
    """One device that trains on all rows and evaluates half of every batch."""
    return _references(name)[1]


def permuted(name: str) -> Result:
    """One device, the rows of every batch in another order: rounding is all that may differ."""
    case = feeds.permuted(CASES[name])
    return one_device(case, case)[0]


def half_lost(name: str) -> Result:
    """One device that trains on half of every batch and evaluates all rows."""
    return one_device(feeds.half_lost(CASES[name]), CASES[name])[0]


@functools.cache
def _mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """The one strategy of this process: Keras crashes under a second one."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


def keras_mirrored(case: Case, num_replicas: int) -> Result:
    """Plain Keras under MirroredStrategy. It may crash or hang: call it in another process."""
    with _mirrored(num_replicas).scope():
        model = case.build()
        for layer in model._flatten_layers():
            if case.sync_batch_norm and isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True  # Keras's own remedy
        return _keras_fit(case, [case], model)[0]


def tfdist(name: str, strategy: str, num_replicas: int) -> Result:
    """tfdist's trainer."""
    from tfdist import Trainer

    case = CASES[name]
    options = {"accumulate": case.accumulate, "sync_batch_norm": case.sync_batch_norm}
    trainer = Trainer(case.build, strategy=strategy, devices=num_replicas, **options)
    history = trainer.fit(**feeds.fit_arguments(case))
    for own in ("loss_scale", "skipped_steps"):  # logged besides what Keras logs
        history.history.pop(own, None)
    evaluation = trainer.evaluate(**feeds.evaluate_arguments(case))
    return collect(trainer.model, history, evaluation)
