"""The network for predictions and benchmarks, and its flags. Imports no TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist import models
from tfdist.config import TrainConfig
from tfdist.console import units
from tfdist.errors import ConfigurationError
from tfdist.tools.plan.exchange import Link

if TYPE_CHECKING:
    import keras

Number = TypeVar("Number", int, float)

#: Networks of `tfdist.models` that are not image classifiers.
_OTHERS = ("autoencoder", "gpt", "unet")
#: Networks of `tfdist.models` without loops. The number of live tensors in a loop depends on the
#: number of iterations, which is not known from the graph.
SUPPORTED = (*models.IMAGE_CLASSIFIERS, *_OTHERS)
#: Default input shape and number of classes: GPT-2's, and ImageNet's for all others.
_DEFAULTS: dict[str, tuple[tuple[int, ...], int]] = {"gpt": ((1024,), 50257)}
_IMAGENET = ((224, 224, 3), 1000)
#: The global batch of a `Workload` that has none.
_GLOBAL_BATCH = 256
#: Help of a `--batch-size` that is the global one.
OF_GLOBAL_BATCH = f"global batch size (default: the recipe's, or {_GLOBAL_BATCH})"


class Workload(Protocol):
    """What is planned or measured: a `Network`, or a user's `programs.Program`."""

    @property
    def model(self) -> str:
        """Its name."""

    @property
    def precision(self) -> str | None:
        """Dtype policy to build the model with; None: its own."""

    def build(self) -> keras.Model:
        """Returns the compiled model."""

    def batch(self, num_rows: int) -> Any:
        """Returns a batch of zeros, because values do not affect the results."""


@dataclass(frozen=True)
class Network:
    """A network and how it is trained.

    Attributes:
        model: One of `SUPPORTED`.
        input_shape: Shape of one example: (height, width, channels); for gpt (tokens,).
        num_classes: Number of classes; for gpt the size of the vocabulary.
        optimizer: A value of `--optimizer` of `python -m tfdist.train`.
        precision: A value of `--precision` of the same command.
        settings: Keyword arguments of the model's builder.

    Raises:
        ConfigurationError: `model` is unknown or contains loops.
    """

    model: str
    input_shape: tuple[int, ...]
    num_classes: int = 1000
    optimizer: str = "adam"
    precision: str = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model not in SUPPORTED:
            raise ConfigurationError(
                f"--model {self.model} is not supported, because its graph contains loops or there "
                f"is no such model. Use one of {', '.join(SUPPORTED)}."
            )

    def build(self) -> keras.Model:
        """Returns the compiled model.

        Raises:
            ConfigurationError: The network cannot be built with this shape or these arguments.
        """
        import keras

        from tfdist import optimizers

        arguments: list[Any] = [self.input_shape, self.num_classes]
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if self.model == "autoencoder":
            arguments, loss = [self.input_shape], "mean_squared_error"
        elif self.model == "gpt":
            arguments = [self.num_classes, self.input_shape[0]]
        try:
            model = getattr(models, self.model)(*arguments, **self.settings)
        except (TypeError, ValueError, IndexError) as error:
            shape = ",".join(map(str, self.input_shape))
            reason, *_ = re.split(r"[.]\s", str(error))
            raise ConfigurationError(
                f"--model {self.model} cannot be built with --input {shape} and these values of "
                f"--set: {reason}"
            ) from None
        fields: dict[str, Any] = {"optimizer": self.optimizer}
        config = TrainConfig(**fields)
        model.compile(optimizers.create(config, config.learning_rate), loss)
        return model

    def batch(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns examples and labels, all zero, because values do not affect the results."""
        shape = (num_rows, *self.input_shape)
        x = np.zeros(shape, "int32" if self.model == "gpt" else "float32")
        if self.model == "autoencoder":
            return x, x
        labels = {"gpt": shape, "unet": shape[:3]}.get(self.model, (num_rows,))
        return x, np.zeros(labels, "int64")


def tiny() -> Network:
    """Returns a network that trains within a second, for smoke runs."""
    return Network("mlp", (64,), 10)


def choices(name: str) -> list[str]:
    """Returns the values that a flag of `python -m tfdist.train` accepts."""
    return list(TrainConfig.model_fields[name].annotation.__args__)  # type: ignore[union-attr]


def add_arguments(parser: ArgumentParser, precision: bool = True) -> None:
    """Adds the flags that describe a network; `precision` includes `--precision`."""
    parser.add_argument(
        "program", nargs="?", metavar="PROGRAM",
        help="your own model: a recipe, a Python file with build_model, a .keras file, or "
        "hub:PRESET (KerasHub's, or a folder with its configuration)",
    )  # fmt: skip
    parser.add_argument("--model", choices=list(SUPPORTED), help="network (default: resnet50)")
    parser.add_argument(
        "--set", action="append", metavar="NAME=VALUE",
        help="argument of the network's builder, or hyperparameter of the recipe",
    )  # fmt: skip
    parser.add_argument(
        "--input", metavar="N,N,N",
        help="shape of an example; for gpt the number of tokens (default: 224,224,3 or 1024); for "
        "PROGRAM the sizes that its Input leaves open",
    )  # fmt: skip
    parser.add_argument(
        "--classes", type=PositiveInt, metavar="N",
        help="number of classes; for gpt the vocabulary size (default: 1000 or 50257)",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", choices=choices("optimizer"), help="optimizer (default: PROGRAM's, or adam)"
    )
    if precision:
        parser.add_argument(
            "--precision", choices=choices("precision"),
            help="number format (default: PROGRAM's, or float32)",
        )  # fmt: skip


def add_plan_arguments(
    parser: ArgumentParser, batch: str, default: int | None = None, link: str = ""
) -> None:
    """Adds the flags that plans share; `link` is the flag of the bandwidth, if there are hosts."""
    add_arguments(parser)
    parser.add_argument(
        "--batch-size", "--batch", type=PositiveInt, default=default, metavar="N", help=batch
    )
    if link:
        parser.add_argument(link, default="25Gb", metavar="RATE", help="bandwidth of a host's link")
        parser.add_argument("--latency", default="20us", metavar="TIME", help="its latency")
    parser.add_argument("--table", metavar="FILE", help="write the table to this .md or .csv file")


def parsed(flag: str, parse: Callable[[str], Number], text: str) -> Number:
    """Returns the number that a flag's value describes.

    Raises:
        ConfigurationError: The value is malformed; the message names the flag.
    """
    try:
        return parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag} {error}") from None


def link(
    bandwidth_flag: str, bandwidth: str, latency_flag: str, latency: str, payload: float = 1.0
) -> Link:
    """Returns the link that the values of two flags describe, of which `payload` is data."""
    return Link(
        payload * parsed(bandwidth_flag, units.bytes_per_second, bandwidth),
        parsed(latency_flag, units.short_seconds, latency),
    )


def global_batch(batch_size: int | None, workload: Workload) -> int:
    """Returns the global batch: that of the flag, the recipe's, or the default."""
    return batch_size or getattr(workload, "batch_size", None) or _GLOBAL_BATCH


def from_flags(
    program: str | None,
    model: str | None,
    set: list[str] | None,
    input: str | None,
    classes: int | None,
    optimizer: str | None,
    precision: str | None = None,
) -> Workload:
    """Returns what the flags of `add_arguments` describe.

    Raises:
        ConfigurationError: A flag has a malformed value.
    """
    sizes: tuple[int, ...] = ()
    if input is not None:
        try:
            sizes = tuple(int(part) for part in input.split(","))
        except ValueError:
            raise ConfigurationError(f"--input {input}: expected numbers like 224,224,3.") from None
    settings: dict[str, Any] = {}
    for word in set or ():
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigurationError(f"--set {word}: expected NAME=VALUE.")
        settings[name] = yaml.safe_load(text)
    if program is not None:
        from tfdist.tools.plan.programs import Program

        if classes:
            raise ConfigurationError(f"--classes: {program} has its own classes.")
        given = {"model": model, "optimizer": optimizer, "precision": precision}
        overrides = {name: value for name, value in given.items() if value is not None}
        return Program(program, sizes, overrides, settings)
    shape, default_classes = _DEFAULTS.get(model or "", _IMAGENET)
    num_classes = int(classes or default_classes)  # Keras 3.8 refuses subclasses of int
    return Network(
        model or "resnet50", sizes or shape, num_classes, optimizer or "adam",
        precision or "float32", settings,
    )  # fmt: skip
