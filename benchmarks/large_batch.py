"""`python -m benchmarks large_batch`: accuracy on the digits by global batch size."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt

from tfdist.config import TrainConfig, default_data_dir
from tfdist.errors import ConfigurationError
from tfdist.tools.bench import harness

if TYPE_CHECKING:
    import keras

DESCRIPTION = "accuracy on the digits by batch size, with and without scaled rates and warm-up"

#: Fields of `TrainConfig` for each way of setting the learning rate.
WAYS: dict[str, dict[str, Any]] = {
    "fixed": {"lr_scaling": "none"},
    "sqrt": {"lr_scaling": "sqrt"},
    "linear": {"lr_scaling": "linear"},
    "sqrt-warmup": {"lr_scaling": "sqrt", "warmup_epochs": 5},
    "linear-warmup": {"lr_scaling": "linear", "warmup_epochs": 5},
}
_BATCHES = [32, 64, 128, 256, 512, 1024]
#: Where the rate falls to a tenth, as parts of the training: epochs 30, 60 and 80 of 90.
_DECAYS = (1 / 3, 2 / 3, 8 / 9)
_NOTE = (
    "Accuracy on the held-out fifth of the digits after the last epoch, in per cent: the median of "
    "the seeds, with the lowest and the highest. All runs have the same number of epochs."
)
Results = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all runs have in common.

    Attributes:
        reference_batch: The batch size that the learning rate is for.
        learning_rate: The rate for that batch size.
        epochs: Number of epochs, the same for every batch size.
        data_dir: Folder for the shards of the digits.
    """

    reference_batch: int
    learning_rate: float
    epochs: int
    data_dir: str

    def config(self, way: str, batch_size: int, seed: int) -> TrainConfig:
        """Returns the configuration of a run; a warm-up begins at the reference's rate."""
        fields = dict(WAYS[way])
        if warmup := fields.get("warmup_epochs"):
            warmup = min(warmup, 0.2 * self.epochs)
            fields |= {"warmup_epochs": warmup, "warmup_start": self.learning_rate}
        return TrainConfig(
            batch_size=batch_size, seed=seed, epochs=self.epochs, data_dir=self.data_dir,
            optimizer="sgd", learning_rate=self.learning_rate, weight_decay=1e-4,
            lr_reference_batch=self.reference_batch, lr_rule="step",
            lr_decay_epochs=[self.epochs * part for part in _DECAYS], **fields,
        )  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--batches", nargs="+", type=PositiveInt, default=_BATCHES, metavar="N",
        help="global batch sizes",
    )  # fmt: skip
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS),
        help="ways of setting the learning rate",
    )  # fmt: skip
    parser.add_argument("--seeds", type=PositiveInt, default=3, metavar="N", help="runs of each")
    parser.add_argument("--epochs", type=PositiveInt, default=40, metavar="N", help="epochs")
    parser.add_argument(
        "--reference-batch", type=PositiveInt, default=32, metavar="N",
        help="batch size that --learning-rate is for",
    )  # fmt: skip
    parser.add_argument(
        "--learning-rate", type=PositiveFloat, default=0.02, metavar="X",
        help="learning rate for --reference-batch",
    )  # fmt: skip
    parser.add_argument(
        "--data-dir", default=default_data_dir(), metavar="DIR", help="folder for the shards"
    )
    parser.add_argument(
        "--add", nargs="+", metavar="FILE", help="also show the runs in these files of --json"
    )
    harness.add_arguments(parser, table=True, chart=True)


def run(
    batches: Sequence[int],
    ways: Sequence[str],
    seeds: int,
    epochs: int,
    reference_batch: int,
    learning_rate: float,
    data_dir: str,
    add: Sequence[str] | None,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Trains and prints a table; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A file of --add does not exist, or another benchmark wrote it.
    """
    if smoke:
        batches, seeds, epochs = [32, 512], 1, 2
    plan = Plan(reference_batch, learning_rate, epochs, data_dir)
    results = [own for path in add or () for own in _read(Path(path))]
    for way in ways:
        results += _runs(plan, way, batches, seeds, results)
    header, *rows = _rows(results)
    output.show(header, rows, "accuracy by global batch size and way of setting the rate")
    output.conclude(results, _NOTE, _paint, (7, 4.5))


def _runs(
    plan: Plan, way: str, batches: Sequence[int], seeds: int, known: Results
) -> list[dict[str, Any]]:
    """Returns the runs of a way.

    Args:
        plan: What all runs have in common.
        way: A name out of `WAYS`.
        batches: Global batch sizes.
        seeds: Runs of each.
        known: Earlier runs. With the reference batch all ways are the same, so that one run serves
            all of them.
    """
    same = {own["seed"]: own for own in known if own["batch_size"] == plan.reference_batch}
    return [
        same[seed] | {"way": way}
        if batch == plan.reference_batch and seed in same
        else _train(plan, way, batch, seed)
        for batch in batches
        for seed in range(seeds)
    ]


def _train(plan: Plan, way: str, batch_size: int, seed: int) -> dict[str, Any]:
    """Trains once on one device.

    Returns:
        `way`, `batch_size`, `seed`, `learning_rate` (the highest), `steps`, and after the last
        epoch `loss` (None where it diverged) and `val_accuracy` on the held-out images.
    """
    import keras

    from tfdist import schedules
    from tfdist.run import recipe
    from tfdist.trainer import Trainer

    config = plan.config(way, batch_size, seed)
    digits = recipe.find("digits")
    keras.utils.set_random_seed(seed)
    data = digits.train_data(config)
    steps = recipe.num_steps(data)
    trainer = Trainer(lambda: _model(config, steps), "one_device")
    history = trainer.fit(
        data, epochs=plan.epochs, validation_data=digits.validation_data(config),
        validation_freq=plan.epochs, verbose=0,
    ).history  # fmt: skip
    loss = history["loss"][-1]
    return {
        "way": way,
        "batch_size": batch_size,
        "seed": seed,
        "learning_rate": schedules.peak(config),
        "steps": int(trainer.model.optimizer.iterations),
        "loss": loss if math.isfinite(loss) else None,
        "val_accuracy": history["val_accuracy"][-1],
    }


def _model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    import keras

    from tfdist import models, optimizers, schedules

    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Rescaling(1 / 16), models.mlp((8, 8, 1), 10)]
    )
    model.compile(
        optimizers.create(config, schedules.learning_rate(config, steps_per_epoch)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _read(path: Path) -> Results:
    """Returns the runs that `--json` wrote.

    Raises:
        ConfigurationError: The file does not exist, or another benchmark wrote it.
    """
    try:
        document = json_format.loads(path.read_text("utf-8"))
        if document["benchmark"] == "large_batch":
            return document["results"]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise ConfigurationError(f"--add {path}: expected a file that --json of large_batch wrote.")


def _rows(results: Results) -> list[list[str]]:
    """Returns the header, and a row for each batch size."""
    ways = _in_order(results, "way")
    rows = [["batch", *ways]]
    for batch in _in_order(results, "batch_size"):
        rows.append([str(batch), *(_cell(_accuracies(results, way, batch)) for way in ways)])
    return rows


def _cell(accuracies: list[float]) -> str:
    median, low, high = (100 * f(accuracies) for f in (np.median, min, max))
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def _accuracies(results: Results, way: str, batch: int) -> list[float]:
    return [
        own["val_accuracy"] for own in results if (own["way"], own["batch_size"]) == (way, batch)
    ]


def _in_order(results: Results, name: str) -> list[Any]:
    return list(dict.fromkeys(own[name] for own in results))


def _paint(figure: Any, results: Results) -> None:
    """Draws a line for each way, with the range of the seeds around it."""
    axes = figure.subplots()
    batches = _in_order(results, "batch_size")
    for way in _in_order(results, "way"):
        found = [_accuracies(results, way, batch) for batch in batches]
        axes.plot(batches, [np.median(own) for own in found], marker="o", label=way)
        low, high = ([f(own) for own in found] for f in (min, max))
        axes.fill_between(batches, low, high, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, batches)
    axes.set(xlabel="global batch size", ylabel="accuracy on held-out digits")
    axes.legend()
    axes.grid(alpha=0.3)
