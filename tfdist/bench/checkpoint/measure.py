"""One network trained again and again, saved by each contender in turn.

All train through one `Trainer`, which is traced once: what differs is who saves. A step's time is
that from the end of the batch before it to its own end, so it holds whatever the training waits
for. The time a save holds the training up is that of the step behind it, without a step's usual
time; what a thread still writes meanwhile costs the steps after it, which the whole time shows.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.bench.interleave import ratio, spread, take_turns
from tfdist.checkpoint.settings import Checkpoints
from tfdist.trainer import Trainer

NONE = "no checkpoints"
_INPUTS, _BATCH = 256, 64


class Taken(NamedTuple):
    """The seconds of a training: all of it, and by which a save held it up."""

    whole: float
    held_up: float


class StepTimes(keras.callbacks.Callback):
    """Notes when each batch has ended; first in the list, so before others save."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def size(num_weights: int, every: int, saves: int, rounds: int, folder: str) -> dict[str, Any]:
    """Returns what each contender takes for a network of a size.

    Args:
        num_weights: About so many.
        every: Steps between two checkpoints.
        saves: Checkpoints of a training; tfdist makes one more, of its end.
        rounds: Trainings of each contender.
        folder: To save in.
    """
    trainer = Trainer(functools.partial(network, num_weights), "one_device", steps_per_call=1)
    num_rows = _BATCH * (every * saves + every // 2)
    rows = np.random.default_rng(0).standard_normal((num_rows, _INPUTS), np.float32)
    places = (Path(folder) / str(number) for number in itertools.count())
    contenders: dict[str, Callable[[], Taken]] = {
        name: functools.partial(_train, trainer, rows, every, places, make)
        for name, make in _makers().items()
    }
    for contender in contenders.values():
        contender()  # compiles, and wakes the disk
    taken = take_turns(contenders, rounds)
    alone = [one.whole for one in taken[NONE]]
    counts = [v.numpy().nbytes for v in trainer.model.variables + trainer.model.optimizer.variables]
    return {
        "weights": trainer.model.count_params(),
        "bytes": sum(counts),
        "every": every,
        "saves": saves,
        "contenders": {
            name: {
                "whole_s": spread([one.whole for one in own])._asdict(),
                "of_none": ratio([one.whole for one in own], alone)._asdict(),
                "held_up_ms": spread([1e3 * one.held_up for one in own])._asdict(),
                "samples": [one._asdict() for one in own],
            }
            for name, own in taken.items()
        },
    }


def network(num_weights: int) -> keras.Model:
    """Two hidden layers of about so many weights, with Adam."""
    width = int((-_INPUTS + (_INPUTS**2 + 4 * num_weights) ** 0.5) / 2)
    layers = [keras.Input((_INPUTS,)), *(keras.layers.Dense(width, "relu") for _ in range(2))]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def _makers() -> dict[str, Any]:
    """By name, what makes the settings of a trainer and the callbacks of a training in a folder."""

    def ours(folder: Path, every: int) -> Any:
        return Checkpoints(folder, every=every, keep=1, resume="never"), []

    def keras_own(folder: Path, every: int) -> Any:
        return None, [keras.callbacks.BackupAndRestore(folder / "backup", save_freq=every)]

    def orbax(folder: Path, every: int) -> Any:
        return None, [keras.callbacks.OrbaxCheckpoint(folder, save_freq=every, max_to_keep=1)]

    found = {NONE: lambda folder, every: (None, []), "tfdist": ours, "BackupAndRestore": keras_own}
    return found | ({"Orbax": orbax} if importlib.util.find_spec("orbax") else {})


def _train(
    trainer: Trainer, rows: np.ndarray, every: int, places: Iterator[Path], make: Any
) -> Taken:
    folder = next(places)
    times = StepTimes()
    trainer.checkpoints, callbacks = make(folder, every)
    began = time.perf_counter()
    trainer.fit(
        rows, rows[:, :1], batch_size=_BATCH, shuffle=False, verbose=0,
        callbacks=[times, *callbacks],
    )  # fmt: skip
    whole = time.perf_counter() - began
    shutil.rmtree(folder, ignore_errors=True)
    steps = np.diff(times.ends)
    is_behind = (np.arange(len(steps)) + 1) % every == 0
    usual = statistics.median(steps[~is_behind].tolist())
    return Taken(whole, statistics.median(steps[is_behind].tolist()) - usual)
