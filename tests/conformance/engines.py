"""Who trains a case: plain Keras on one device, plain Keras mirrored, tfdist."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from tests.conformance import feeds
from tests.conformance.cases import CASES
from tests.conformance.results import Result, collect
from tests.support.case import Case

# tfdist's strategies of one process, each with how many replicas.
STRATEGIES = [("one_device", 1)] + [
    (name, num_replicas)
    for name in ("mirrored", "central_storage", "towers")
    for num_replicas in (2, 3)
]


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


def tfdist(case: Case, strategy: str, num_replicas: int) -> Result:
    """tfdist's trainer.

    Raises:
        tfdist.errors.TfdistError: it declines the case.
    """
    from tfdist import Trainer

    trainer = Trainer(
        case.build,
        strategy=strategy,
        devices=num_replicas,
        accumulate=case.accumulate,
        sync_batch_norm=case.sync_batch_norm,
    )
    history = trainer.fit(**feeds.fit_arguments(case))
    for own in ("loss_scale", "skipped_steps"):  # logged besides what Keras logs
        history.history.pop(own, None)
    evaluation = trainer.evaluate(**feeds.evaluate_arguments(case))
    return collect(trainer.model, history, evaluation)
