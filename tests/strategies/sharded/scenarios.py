"""Scenarios that two processes run, each with a shard of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

import tfdist
from tests.processes import chief_callbacks
from tests.support.case import compiled
from tests.support.training import FIT, X, momentum
from tfdist.errors import ClusterError
from tfdist.groups import traffic
from tfdist.strategies.base import Strategy
from tfdist.strategies.sharded.plan import bytes_by_device
from tfdist.strategies.sharded.strategy import Sharded
from tfdist.trainer import Trainer
from tfdist.upstream.weight_files import FileArray

#: Rows for `wide`.
WIDE = np.ones((4, 64), "float32")

#: Number of epochs after the run before, after the scenario, and after the run that follows.
EPOCHS = (1, 2, 3)


def run(folder: str) -> dict[str, Any]:
    """Runs all scenarios, and returns their results."""
    strategy = Sharded(smallest=2)
    resumed = resume_from_another_strategy(strategy, Path(folder, "checkpoints"))
    results = {
        "callbacks": chief_callbacks.writes_and_restores(strategy),
        "on rank 0": use_model_on_rank_0(strategy, Path(folder, "model.keras")),
        "error": read_model_on_rank_1(strategy),
        "bytes sent": [
            num_bytes_sent(strategy, precision) for precision in ("float32", "mixed_float16")
        ],
        "bytes while loading": strategy.group.gather(bytes_while_loading(strategy)),
        "loaded": strategy.group.gather(load_files(strategy, Path(folder))),
        "state bytes": strategy.group.gather(
            [sum(bytes_by_device(resumed.model.optimizer.variables).values())]
        ),
    }
    if tfdist.is_chief():  # the other rank is done
        resumed.model.save(Path(folder, "resumed.keras"))
    return results


def resume_from_another_strategy(strategy: Strategy, folder: Path) -> Trainer:
    """Resumes from a checkpoint of another strategy."""
    trainer = Trainer(momentum, strategy, checkpoints=tfdist.Checkpoints(folder))
    first_epochs: list[int] = []
    recorder = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: first_epochs.append(epoch)
    )
    trainer.fit(**FIT, epochs=EPOCHS[1], callbacks=[recorder])
    assert first_epochs == [EPOCHS[0]]
    return trainer


def use_model_on_rank_0(strategy: Strategy, path: Path) -> np.ndarray:
    """Rank 0 reads, saves, predicts and assigns; rank 1 gets the assigned values."""
    trainer = Trainer(momentum, strategy)
    trainer.fit(**FIT)
    if strategy.group.is_chief:
        model = trainer.model
        model.save(path)
        loaded = keras.models.load_model(path)
        np.testing.assert_array_equal(model.predict(X, verbose=0), loaded.predict(X, verbose=0))
        kernel = model.trainable_variables[0]
        kernel.assign(0.5 * kernel)
    tfdist.barrier()
    weights = np.concatenate([weight.ravel() for weight in trainer.model.get_weights()])
    return strategy.group.gather(weights)


def bytes_while_loading(strategy: Strategy) -> list[float]:
    """Makes a model, and loads a weight; returns its bytes, the most that this rank had, and that.

    Each rank loads other values, and those of rank 0 count.
    """
    held = list[int]()

    def deep() -> keras.Model:
        made, hidden = list[Any](), (inputs := keras.Input((64,)))
        for _ in range(4):
            made.append(keras.layers.Dense(64, use_bias=False))
            hidden = made[-1](hidden)
            held.append(sum(bytes_by_device(layer.kernel for layer in made).values()))
        weight = made[0].kernel
        weight.assign(np.full(weight.shape, strategy.group.rank + 1, "float32"))
        model = keras.Model(inputs, hidden)
        model.compile("sgd", "mse")
        return model

    model = Trainer(deep, strategy).model
    return [4 * model.count_params(), max(held), float(model.weights[0].numpy().mean())]


def large(value: float) -> keras.Model:
    """Returns a network of four layers of 1 MB each, with weights of a value."""
    inputs = hidden = keras.Input((512,))
    for _ in range(4):
        initializer = keras.initializers.Constant(value)
        hidden = keras.layers.Dense(512, use_bias=False, kernel_initializer=initializer)(hidden)
    return compiled(keras.Model(inputs, hidden))


def load_files(strategy: Strategy, folder: Path) -> list[float]:
    """Loads `large.keras`; returns which part of it this process read, and some weights.

    Then each rank loads another file, and rank 0 loads one alone.
    """
    elements, read = FileArray.elements, list[int]()

    def counted(array: FileArray, begin: int, end: int) -> np.ndarray:
        read.append(end - begin)
        return elements(array, begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileArray, "elements", counted)
        model = Trainer(lambda: keras.saving.load_model(folder / "large.keras"), strategy).model
    part = sum(read) / model.count_params()
    sevens = model.weights[3].numpy()
    file = folder / f"rank {strategy.group.rank}.weights.h5"
    wide().save_weights(file)

    def other(is_loaded: bool) -> keras.Model:
        model = wide()
        if is_loaded:
            model.load_weights(file)
        return model

    with h5py.File(file, "r+") as changed:
        for layer in changed["layers"].values():
            layer["vars/0"][:] = strategy.group.rank + 1
    ones = Trainer(lambda: other(True), strategy).model.weights[1].numpy()
    alone = Trainer(lambda: other(strategy.group.is_chief), strategy).model.weights[1].numpy()
    extremes = [float(f(values)) for values in (sevens, ones, alone) for f in (np.min, np.max)]
    return [part, *extremes]


def num_bytes_sent(strategy: Strategy, precision: str) -> float:
    """Trains a step with a bucket for each layer, and returns the bytes that this process sent."""
    strategy.exchange.bucket_bytes = 1
    trainer = Trainer(wide, strategy, precision=precision)
    with traffic.counted(strategy.group.size) as counted:
        trainer.fit(WIDE, WIDE, batch_size=len(WIDE), verbose=0)
    return counted.num_bytes()


def wide() -> keras.Model:
    """Returns a network of four layers of 4,096 weights each."""
    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(64, "tanh", use_bias=False) for _ in range(4)]
    return compiled(keras.Sequential([keras.Input((64,)), *dense]), keras.optimizers.SGD(0.1))


def read_model_on_rank_1(strategy: Strategy) -> str:
    """Returns the error of rank 1."""
    trainer, message = Trainer(momentum, strategy), ""
    trainer.fit(**FIT)
    if strategy.group.rank == 1:
        try:
            trainer.model.get_weights()
        except ClusterError as error:
            message = str(error)
    lengths = strategy.group.gather([len(message)])
    letters = strategy.group.gather([*map(ord, message.ljust(int(lengths.max())))])
    return "".join(map(chr, letters[1].astype(int)))
