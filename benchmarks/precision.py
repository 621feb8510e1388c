"""`python -m benchmarks precision`: speed, memory and accuracy by number format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.config import default_data_dir
from tfdist.tools.bench import harness
from tfdist.tools.plan import network as networks

DESCRIPTION = "speed, memory and accuracy by number format"
_PRECISIONS = ["float32", "mixed_float16", "mixed_bfloat16"]
_HEADER = ("precision", "device", "ms/step", "examples/s", "peak MB", "accuracy", "loss")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_arguments(parser, precision=False)
    parser.add_argument(
        "--precisions", nargs="+", choices=networks.choices("precision"), default=_PRECISIONS,
        help="number formats",
    )  # fmt: skip
    parser.add_argument("--batch", type=PositiveInt, default=32, metavar="N", help="batch size")
    parser.add_argument(
        "--epochs", type=PositiveInt, default=10, metavar="N",
        help="epochs of the recipe digits, for the accuracy",
    )  # fmt: skip
    parser.add_argument(
        "--data-dir", default=default_data_dir(), metavar="DIR", help="folder for the shards"
    )
    harness.add_arguments(parser, steps=5, table=True, chart=True)


def run(
    precisions: Sequence[str],
    batch: int,
    steps: int,
    epochs: int,
    data_dir: str,
    output: harness.Output,
    smoke: bool,
    **network: Any,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag has a value that does not fit.
        LaunchError: A training fails.
    """
    chosen = networks.tiny() if smoke else networks.from_flags(**network)
    if smoke:
        precisions, batch, steps, epochs = precisions[:2], 4, 2, 1
    results = [
        _speed(chosen, precision, batch, steps) | _accuracy(precision, epochs, data_dir)
        for precision in precisions
    ]
    title = f"{chosen.model}, batch {batch}; accuracy on held-out digits after {epochs} epochs"
    output.show(_HEADER, [_cells(row) for row in results], title)
    output.conclude(results, paint=_paint, size=(10, 4.5))


def _speed(network: networks.Network, precision: str, batch: int, num_steps: int) -> dict[str, Any]:
    """Returns time and memory of a step, measured in a process of its own.

    Raises:
        LaunchError: The training fails.
    """
    from tfdist.tools.plan import step_profile

    with step_profile.pool() as pool:
        one = dataclasses.replace(network, precision=precision)
        (sample,) = pool.ask(one, batch, "one_device", 1, num_steps)
    return {"precision": precision} | sample.as_row(batch)


def _accuracy(precision: str, epochs: int, data_dir: str) -> dict[str, Any]:
    """Returns loss and accuracy on the held-out digits after a training in this format."""
    import keras

    from tfdist.run import flags, from_config, recipe

    words = ["--precision", precision, "--epochs", str(epochs), "--data-dir", data_dir]
    config = flags.parse("python -m tfdist.train", "", ["--recipe", "digits", *words])
    workload = recipe.find(config.recipe)
    keras.utils.set_random_seed(config.seed)
    strategy = from_config.make_strategy(config)
    data, validation = from_config.make_data(config, workload, strategy)
    trainer = from_config.make_trainer(config, workload, strategy, recipe.num_steps(data))
    history = trainer.fit(
        data, validation_data=validation, epochs=epochs, verbose=0, shuffle=False
    ).history
    return {name: history[name][-1] for name in ("val_loss", "val_accuracy")}


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = (f"{row['ms']:.1f}", f"{row['examples_per_s']:.0f}", f"{row['peak_mb']:.0f}")
    quality = (f"{row['val_accuracy']:.3f}", f"{row['val_loss']:.3f}")
    return [row["precision"], row["device"], *numbers, *quality]


def _paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draws speed, memory and accuracy side by side."""
    names = [row["precision"].removeprefix("mixed_") for row in results]
    panels = {
        "examples per second": "examples_per_s", "peak memory, MB": "peak_mb",
        "accuracy on held-out digits": "val_accuracy",
    }  # fmt: skip
    for axes, (title, key) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.bar(names, [row[key] for row in results])
        axes.set_title(title)
