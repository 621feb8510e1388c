"""Programs that the ranks run; the tests in the parent process compare their results."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
import tfdist.horovod as hvd
from tests.horovod.training import CASES, X, Y, dense, fit, sgd, share
from tfdist.errors import TfdistError
from tfdist.groups.fusion import FUSION_LIMIT
from tfdist.horovod.optimizer import exchanges_of


def train(name: str) -> list[np.ndarray]:
    """Returns the weights of a case."""
    case = CASES[name]
    options = case.options | {}
    if "op" in options:
        options["op"] = getattr(hvd, options["op"])
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    model, optimizer = case.model(), hvd.DistributedOptimizer(case.optimizer(), **options)
    rows = [share(part, hvd.rank(), hvd.size()) for part in case.rows]
    case.train(model, optimizer, tuple(rows), hvd.size())
    return model.get_weights()


def overflow(wrap: Callable[[], keras.optimizers.Optimizer]) -> dict[str, Any]:
    """Returns the results of a training in which rank 1's third batch of six overflows."""
    model, optimizer = dense(), wrap()
    x, y = (share(part, hvd.rank(), hvd.size()).copy() for part in (X, Y))
    if hvd.rank() == 1:
        y[2 * len(y) // 6] = 1e38
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=len(x) // 6, shuffle=False, verbose=0)
    state = {"scale": float(optimizer.dynamic_scale), "steps": int(optimizer.iterations)}
    return state | {"weights": model.get_weights()}


def loss_scale_outside() -> keras.optimizers.Optimizer:
    inner = hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


def loss_scale_inside() -> keras.optimizers.Optimizer:
    outer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)
    return hvd.DistributedOptimizer(outer)


def start_from_rank_1() -> dict[str, Any]:
    """Ranks with different initial weights; the learning rate is 0."""
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dropout(0.5, seed=hvd.rank()), keras.layers.Dense(1)]
    )
    rank = float(hvd.rank())
    model.layers[1].set_weights([np.full((4, 1), rank), np.full(1, rank)])
    model.compile(hvd.DistributedOptimizer(sgd(learning_rate=0.0)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(10 * hvd.rank())
    local = [model.layers[1].bias]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, "", local_variables=local)
    model.fit(X, Y, batch_size=len(X), verbose=0, callbacks=[callback])
    seeds = [int(generator.state.value[0]) for generator in model.layers[0]._seed_generators]
    return {
        "kernel": model.get_weights()[0].tolist(),
        "bias": model.get_weights()[1].tolist(),
        "steps": int(model.optimizer.iterations),
        "seeds": seeds,
    }


def raised(make: Callable[[], Any]) -> str:
    """Returns the message of a tfdist error."""
    try:
        make()
    except TfdistError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def fitted(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, rows: int = len(X), **options: Any
) -> None:
    model.compile(optimizer, "mse")
    callbacks = [hvd.BroadcastGlobalVariablesCallback()]
    model.fit(X[:rows], Y[:rows], batch_size=8, verbose=0, callbacks=callbacks, **options)


def without_the_optimizer() -> None:
    x = X * (1.0 + hvd.rank())
    model = dense()
    model.compile(sgd(), "mse")
    model.fit(x, Y, verbose=0, callbacks=[hvd.BroadcastGlobalVariablesCallback()])


def different_shapes() -> None:
    layers = [keras.Input((4,)), keras.layers.Dense(2 + hvd.rank()), keras.layers.Dense(1)]
    fitted(keras.Sequential(layers), hvd.DistributedOptimizer(sgd()))


def different_numbers_of_batches() -> None:
    fitted(dense(), hvd.DistributedOptimizer(sgd()), rows=16 + 8 * hvd.rank())


def without_input() -> list[np.ndarray]:
    """A model without weights before its first batch; initial weights would differ by rank."""
    keras.utils.set_random_seed(1 + hvd.rank())
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    rows = tuple(share(part, hvd.rank(), hvd.size()) for part in (X, Y))
    callback = hvd.BroadcastGlobalVariablesCallback(0)
    fit(model, hvd.DistributedOptimizer(sgd()), rows, hvd.size(), callbacks=[callback])
    return model.get_weights()


def loaded() -> int:
    """Returns how often the optimizer of a saved and loaded model reduces its gradients."""
    model = dense()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        return len(exchanges_of(hvd.load_model(Path(folder) / "model.keras").optimizer))


def twice() -> None:
    hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))


def subset_of_ranks() -> None:
    hvd.DistributedOptimizer(sgd(), process_set=hvd.global_process_set, groups=None, name=None)
    hvd.DistributedOptimizer(sgd(), process_set=hvd.ProcessSet([0]))


def local_weights() -> None:
    hvd.DistributedOptimizer(sgd()).register_local_var(dense().weights[0])


def in_the_trainer() -> None:
    def build() -> keras.Model:
        model = dense()
        model.compile(hvd.DistributedOptimizer(sgd()), "mse")
        return model

    tfdist.Trainer(build, "horovod")


def passes_of_a_built_optimizer() -> None:
    optimizer = sgd()
    optimizer.build(dense().trainable_variables)
    hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)


def scheduled_twice() -> None:
    model = dense()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    model.compile(hvd.DistributedOptimizer(sgd(learning_rate=schedule)), "mse")
    callback = hvd.LearningRateWarmupCallback(0.1)
    model.fit(X, Y, verbose=0, callbacks=[callback])


def metrics_of_uneven_shards() -> dict[str, list[float]]:
    """Three quarters of the rows are on rank 0; the learning rate is 0."""
    rows = slice(0, 36) if hvd.rank() == 0 else slice(36, 48)
    model = dense()
    auc = keras.metrics.AUC(num_thresholds=20, from_logits=True)
    model.compile(hvd.DistributedOptimizer(sgd(learning_rate=0.0)), "mse", metrics=["mae", auc])
    x, y = X[rows], Y[rows] > 0
    validation = x[::-1][:-3], y[::-1][:-3]
    history = model.fit(
        x, y, batch_size=len(x) // 2, verbose=0, epochs=2,
        validation_data=validation, callbacks=[hvd.MetricAverageCallback()],
    )  # fmt: skip
    return history.history


def learning_rates() -> dict[str, Any]:
    """A warm-up of two epochs, then steps, with four batches per epoch."""
    seen: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(float(self.model.optimizer.learning_rate))

    model = dense()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    callbacks = [
        hvd.LearningRateWarmupCallback(0.4, warmup_epochs=2),
        hvd.LearningRateScheduleCallback(0.4, 1.0, start_epoch=2, end_epoch=3),
        hvd.LearningRateScheduleCallback(0.4, lambda epoch: 0.1, start_epoch=3),
        Watch(),
    ]
    history = model.fit(X, Y, batch_size=12, epochs=4, verbose=0, callbacks=callbacks)
    return {"batches": seen, "epochs": history.history["learning_rate"]}


def velocity() -> list[np.ndarray]:
    """Two steps on one batch with gradients of 1, the second at twice the learning rate."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(hvd.DistributedOptimizer(sgd()), "mae")
    schedule = hvd.LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch)
    model.set_weights([np.full((1, 1), 50.0)])
    model.fit(np.ones((4, 1)), np.zeros(4), epochs=2, verbose=0, callbacks=[schedule])
    return model.get_weights()


def saved() -> str:
    """Returns the path to which rank 0 saved its model. The parent process removes the file."""
    model = dense()
    fit(model, hvd.DistributedOptimizer(sgd(clipnorm=0.1)), (X, Y), 1)
    if hvd.rank():
        return ""
    path = Path(tempfile.mkdtemp()) / "model.keras"
    model.save(path)
    return str(path)


def with_xla() -> dict[str, Any]:
    model = dense()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(hvd.DistributedOptimizer(sgd()), "mse", jit_compile=True)
        model.fit(X, Y, verbose=0)
    other = dense()
    other.compile(sgd(), "mse", jit_compile=True)
    warned = any("jit_compile" in str(warning.message) for warning in caught)
    return {"distributed": model.jit_compile, "warned": warned, "other": other.jit_compile}


def batch_norm() -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8), hvd.SyncBatchNormalization(momentum=0.5)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    rows = tuple(share(part, hvd.rank(), hvd.size()) for part in (X, Y))
    fit(model, hvd.DistributedOptimizer(sgd()), rows, hvd.size())
    return model.get_weights()


def operations() -> dict[str, Any]:
    rank = float(hvd.rank())
    seed = keras.Variable([hvd.rank(), 2**32 - 1 - hvd.rank()], dtype="uint32")
    plain = tf.Variable([rank])
    large = tf.Variable(tf.fill([FUSION_LIMIT], rank))  # is reduced without fusion
    hvd.broadcast_variables([large, seed, plain], root_rank=1)
    return {
        "average": float(hvd.allreduce(rank)),
        "sum": float(hvd.allreduce(rank, op=hvd.Sum)),
        "gathered": hvd.allgather([rank, 7.0]).numpy().tolist(),
        "scattered": hvd.reducescatter([rank, 2 * rank], op=hvd.Sum).numpy().tolist(),
        "broadcast": float(hvd.broadcast(rank, root_rank=1)),
        "Horovod's": [hvd.is_initialized(), hvd.mpi_enabled(), hvd.global_process_set.size()],
        "variables": [seed.numpy().tolist(), plain.numpy().tolist(), float(large[-1])],
        "ranks": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()],
        "tfdist": [tfdist.rank(), tfdist.size()],
    }


ERRORS = [
    without_the_optimizer, different_shapes, different_numbers_of_batches,
    twice, subset_of_ranks, local_weights, in_the_trainer, passes_of_a_built_optimizer,
    scheduled_twice,
]  # fmt: skip
PROGRAMS: dict[str, Callable[[], Any]] = {
    **{f"train {name}": functools.partial(train, name) for name in CASES},
    "loss_scale_outside": functools.partial(overflow, loss_scale_outside),
    "loss_scale_inside": functools.partial(overflow, loss_scale_inside),
    **{fn.__name__: functools.partial(raised, fn) for fn in ERRORS},
    **{
        fn.__name__: fn
        for fn in (
            start_from_rank_1, metrics_of_uneven_shards, learning_rates, velocity, saved,
            with_xla, batch_norm, operations, without_input, loaded,
        )
    },
}  # fmt: skip
