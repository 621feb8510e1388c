"""Attacks on two workers that train together: rank 1 does something else than rank 0."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

import tfdist
from tests.processes.agreement import error_of, rank_data
from tests.support.case import compiled, mlp
from tests.support.training import X, Y, build
from tfdist.strategies.base import Strategy
from tfdist.trainer import Trainer

_FIT: dict[str, Any] = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}


def run(strategy_name: str) -> dict[str, str]:
    """Returns the error of each attack, by its name; called on every worker."""
    strategy = tfdist.strategies.create(strategy_name)
    return {name: error_of(functools.partial(attack, strategy)) for name, attack in ATTACKS.items()}


def _fit(strategy: Strategy, make: Callable[[], keras.Model] = build, **options: Any) -> None:
    Trainer(make, strategy).fit(X, Y, **_FIT, **options)


def _middle_rows(strategy: Strategy) -> None:
    """Each batch begins and ends with the same rows on both ranks."""
    order = [0, 3, 2, 1, 4] if strategy.group.rank else [0, 1, 2, 3, 4]
    rows = [5 * batch + i for batch in range(3) for i in order]
    Trainer(build, strategy).fit(X[rows], Y[rows], **_FIT)


def _momentum(strategy: Strategy) -> None:
    momentum = 0.5 if strategy.group.rank else 0.9
    _fit(strategy, lambda: build(keras.optimizers.SGD(0.1, momentum=momentum)))


def _activation(strategy: Strategy) -> None:
    _fit(strategy, lambda: compiled(mlp(activation="relu" if strategy.group.rank else "tanh")))


def _loss(strategy: Strategy) -> None:
    """Of the same name, and with other code."""
    factor = (lambda y: 3 * y) if strategy.group.rank else (lambda y: y)
    _fit(strategy, lambda: build(loss=lambda y, found: keras.ops.square(factor(y) - found)))


def _rate_by_batch(strategy: Strategy) -> None:
    def set_rate(batch: int, logs: Any) -> None:
        callback.model.optimizer.learning_rate = 0.05 if strategy.group.rank else 0.1

    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=set_rate)
    _fit(strategy, callbacks=[callback])


def _rate_by_epoch(strategy: Strategy) -> None:
    rate = 0.05 if strategy.group.rank else 0.1
    _fit(strategy, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: rate)])


def _weights(strategy: Strategy) -> None:
    def edit(batch: int, logs: Any) -> None:
        if strategy.group.rank and batch == 1:
            weight = callback.model.layers[0].kernel
            weight.assign(weight + 1.0)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=edit)
    _fit(strategy, callbacks=[callback])


def _weights_by_hand(strategy: Strategy) -> None:
    trainer = Trainer(build, strategy)
    trainer.fit(X, Y, **_FIT)
    if strategy.group.rank:
        weight = trainer.model.layers[0].kernel
        weight.assign(weight + 1.0)
    trainer.fit(X, Y, **_FIT)


def _uneven(strategy: Strategy) -> None:
    Trainer(build, strategy, uneven_data="refuse").fit(rank_data, verbose=0)


ATTACKS: dict[str, Callable[[Strategy], None]] = {
    "reverses the rows in the middle of each batch": _middle_rows,
    "has momentum 0.5 instead of 0.9": _momentum,
    "has another activation": _activation,
    "has a loss of the same name with other code": _loss,
    "sets another rate in a batch callback": _rate_by_batch,
    "has a LearningRateScheduler with another rate": _rate_by_epoch,
    "edits weights in a callback": _weights,
    "edits weights between two trainings": _weights_by_hand,
    "has fewer batches of its own, and uneven_data is refuse": _uneven,
}

#: A regular expression that matches the error of each attack.
EXPECTED = dict(
    zip(
        ATTACKS,
        (
            "rank 1 got different batches from rank 0",
            "momentum is 0.9 on rank 0 and 0.5 on rank 1",
            "activation is tanh on rank 0 and relu on rank 1",
            "configured differently: loss",
            "learning_rate is 0.1.* on rank 0 and 0.05.* on rank 1 before step 1 of epoch 1",
            "learning_rate is 0.1.* on rank 0 and 0.05.* on rank 1 before step 1 of epoch 1",
            "variables differ between ranks.* 'sequential.*kernel' on rank 1",
            "differ between ranks at the beginning .* 'sequential.*kernel' on rank 1",
            "workers had 3, 2 batches",
        ),
        strict=True,
    )
)
