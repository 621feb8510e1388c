"""`python -m benchmarks checkpoint`: the overhead of checkpoints.

All variants train with the same `Trainer`, which is traced once, and save in different ways. The
time for which a save blocks the training is that of the step after it minus the usual time of a
step. What a thread still writes in the background slows the following steps down, which the time of
the whole training shows.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import tables
from tfdist.tools.bench import harness
from tfdist.tools.bench.harness import NOTE

if TYPE_CHECKING:
    import keras

    from tfdist.trainer import Trainer

DESCRIPTION = (
    "measures the overhead of checkpoints, compared with Keras's BackupAndRestore and Orbax"
)

NONE = "no checkpoints"
_INPUTS, _BATCH = 256, 64

#: Takes a folder and the steps between checkpoints; returns the trainer's checkpoint settings and
#: callbacks.
Saver = Callable[[Path, int], tuple[Any, list[Any]]]


class Times(NamedTuple):
    """Seconds of a training run, and seconds for which a save blocks it (median)."""

    whole: float
    blocked: float


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--weights", nargs="+", type=PositiveInt, default=[1_000_000, 25_000_000], metavar="N",
        help="approximate numbers of weights; Adam stores two more values per weight",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=PositiveInt, default=10, metavar="STEPS", help="steps between checkpoints"
    )
    parser.add_argument(
        "--saves", type=PositiveInt, default=3, metavar="N", help="checkpoints per training run"
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="folder for the checkpoints (default: a temporary one)"
    )
    harness.add_arguments(parser, rounds=5)


def run(
    weights: Sequence[int],
    every: int,
    saves: int,
    folder: str | None,
    rounds: int,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Measures and prints a table for each network; the arguments are the values of the flags."""
    sizes = list(weights)
    if smoke:
        sizes, every, saves, rounds = [10_000], 2, 2, 2
    with tempfile.TemporaryDirectory(dir=folder) as work_folder:
        results = [compare(number, every, saves, rounds, work_folder) for number in sizes]
    for result in results:
        _show(result, output)
    if not any("Orbax" in result["contenders"] for result in results):
        tables.text("Orbax was not measured: orbax-checkpoint is not installed.")
    output.conclude(results, NOTE)


def compare(
    num_weights: int, every: int, saves: int, num_rounds: int, folder: str
) -> dict[str, Any]:
    """Returns the times of each variant for a network of one size.

    Args:
        num_weights: Approximate number of weights.
        every: Steps between checkpoints.
        saves: Checkpoints per training run; tfdist saves another one at the end.
        num_rounds: Training runs of each variant.
        folder: Folder for the checkpoints.
    """
    from tfdist.trainer import Trainer

    trainer = Trainer(functools.partial(_network, num_weights), "one_device", steps_per_call=1)
    num_rows = _BATCH * (every * saves + every // 2)
    rows = np.random.default_rng(0).standard_normal((num_rows, _INPUTS), np.float32)
    places = (Path(folder) / str(number) for number in itertools.count())
    contenders: dict[str, Callable[[], Times]] = {
        name: functools.partial(_train, trainer, rows, every, places, saver)
        for name, saver in _savers().items()
    }
    for contender in contenders.values():
        contender()  # compiles, and warms up the disk cache
    samples = harness.run_in_turns(contenders, num_rounds)
    alone = [one.whole for one in samples[NONE]]
    counts = [v.numpy().nbytes for v in trainer.model.variables + trainer.model.optimizer.variables]
    return {
        "weights": trainer.model.count_params(),
        "bytes": sum(counts),
        "every": every,
        "saves": saves,
        "contenders": {
            name: {
                "whole_s": harness.spread([one.whole for one in measured]),
                "of_none": harness.ratio([one.whole for one in measured], alone),
                "held_up_ms": harness.spread([1e3 * one.blocked for one in measured]),
                "samples": [one._asdict() for one in measured],
            }
            for name, measured in samples.items()
        },
    }


def _network(num_weights: int) -> keras.Model:
    """Returns a network with two hidden layers and about `num_weights` weights, with Adam."""
    import keras

    width = int((-_INPUTS + (_INPUTS**2 + 4 * num_weights) ** 0.5) / 2)
    layers = [keras.Input((_INPUTS,)), *(keras.layers.Dense(width, "relu") for _ in range(2))]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def _savers() -> dict[str, Saver]:
    """Returns the variants whose packages are installed."""
    import keras

    from tfdist.checkpoint.settings import Checkpoints

    callbacks = keras.callbacks
    savers: dict[str, Saver] = {
        NONE: lambda folder, every: (None, []),
        "tfdist": lambda folder, every: (
            Checkpoints(folder, every=every, keep=1, resume="never"), []
        ),
        "BackupAndRestore": lambda folder, every: (
            None, [callbacks.BackupAndRestore(folder / "backup", save_freq=every)]
        ),
    }  # fmt: skip
    if importlib.util.find_spec("orbax"):
        savers["Orbax"] = lambda folder, every: (
            None, [callbacks.OrbaxCheckpoint(folder, save_freq=every, max_to_keep=1)]
        )  # fmt: skip
    return savers


def _train(
    trainer: Trainer, rows: np.ndarray, every: int, places: Iterator[Path], saver: Saver
) -> Times:
    from tfdist.tools.plan.step_profile import StepTimes

    folder = next(places)
    times = StepTimes()  # first in the list, so that it runs before callbacks that save
    trainer.checkpoints, callbacks = saver(folder, every)
    began = time.perf_counter()
    trainer.fit(
        rows, rows[:, :1], batch_size=_BATCH, shuffle=False, verbose=0,
        callbacks=[times, *callbacks],
    )  # fmt: skip
    whole = time.perf_counter() - began
    shutil.rmtree(folder, ignore_errors=True)
    steps = np.diff(times.ends)
    after_save = (np.arange(len(steps)) + 1) % every == 0
    usual = statistics.median(steps[~after_save].tolist())
    return Times(whole, statistics.median(steps[after_save].tolist()) - usual)


def _show(result: dict[str, Any], output: harness.Output) -> None:
    rows = []
    for name, contender in result["contenders"].items():
        blocked = "" if name == NONE else harness.as_text(contender["held_up_ms"], ".0f")
        relative = "" if name == NONE else harness.as_text(contender["of_none"])
        rows.append((name, harness.as_text(contender["whole_s"]), relative, blocked))
    output.show(
        ("", "training, s", "relative to none", "blocked per save, ms"),
        rows,
        f"{result['weights']} weights, {result['bytes'] / 1e6:.0f} MB, {result['saves']} "
        f"checkpoints, one every {result['every']} steps",
    )
