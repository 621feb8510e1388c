"""Cases of the arguments of `fit`: epochs, validation, callbacks; and of accumulation."""

from __future__ import annotations

import keras

from tests.support.case import case, compiled, mlp
from tests.support.data import points


@case(points(), feed="endless", fit={"steps_per_epoch": 2}, evaluate={"steps": 3}, epochs=3)
def steps_per_epoch() -> keras.Model:
    """`steps_per_epoch` with an infinite dataset."""
    return compiled(mlp(), metrics=["mae"])


@case(points(22), fit={"validation_split": 0.3})
def validation_split() -> keras.Model:
    """`validation_split`, with uneven batches."""
    return compiled(mlp(), metrics=["mae"])


@case(
    points(),
    epochs=4,
    fit={
        "validation_data": (points(9).x, 1 - points(9).y),
        "validation_freq": 2,
        "validation_batch_size": 4,
    },
)
def validation_freq() -> keras.Model:
    """`validation_freq=2`."""
    return compiled(mlp(), metrics=["mae"])


@case(points(), epochs=5, fit={"initial_epoch": 3})
def initial_epoch() -> keras.Model:
    """`initial_epoch`."""
    return compiled(mlp(), metrics=["mae"])


@case(
    points(),
    epochs=3,
    fit={"callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.6 * rate)]},
)
def learning_rate_callback() -> keras.Model:
    """A callback that sets the learning rate (`LearningRateScheduler`)."""
    return compiled(mlp())


STOP = {"monitor": "val_loss", "patience": 1, "restore_best_weights": True}


@case(
    points(),
    epochs=4,
    fit={
        "validation_data": (points().x, -points().y),
        "callbacks": [keras.callbacks.EarlyStopping(**STOP)],
    },
)
def early_stopping() -> keras.Model:
    """A callback that stops training and restores the best weights (`EarlyStopping`)."""
    return compiled(mlp())


@case(points(), accumulate=2)
def accumulate() -> keras.Model:
    """The trainer's `accumulate`: a global batch in several rounds."""
    return compiled(mlp(), keras.optimizers.SGD(0.1, momentum=0.9), metrics=["mae"])


@case(points(weighted=True), accumulate=3)
def accumulate_clipped() -> keras.Model:
    """The trainer's `accumulate` with clipping and a divisor that is a sum of weights."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return compiled(mlp(), keras.optimizers.SGD(0.5, global_clipnorm=0.5), loss)
