"""The flags that say what is planned. Imports no TensorFlow."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.plan.network import KNOWN, Network

#: What an example is where nobody says: ImageNet's photographs, and GPT-2's rows.
_USUAL: dict[str, tuple[tuple[int, ...], int]] = {"gpt": ((1024,), 50257)}
_IMAGES = ((224, 224, 3), 1000)


def words_of(name: str) -> list[str]:
    """Returns what the training command's flag takes."""
    return list(TrainConfig.model_fields[name].annotation.__args__)  # type: ignore[union-attr]


def add_network(parser: ArgumentParser, precision: bool = True) -> None:
    """Adds the flags of a network; `precision`: also that of its number format."""
    parser.add_argument("--model", choices=list(KNOWN), default="resnet50", help="which network")
    parser.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="an argument of the network, each"
    )
    parser.add_argument(
        "--input", metavar="N,N,N",
        help="shape of an example: of images, or the tokens of gpt; left out: 224,224,3, or 1024",
    )  # fmt: skip
    parser.add_argument(
        "--classes", type=PositiveInt, metavar="N", help="left out: 1000; of gpt 50257 tokens"
    )
    parser.add_argument(
        "--optimizer", choices=words_of("optimizer"), default="adam", help="what trains it"
    )
    if precision:
        parser.add_argument(
            "--precision", choices=words_of("precision"), default="float32", help="of numbers"
        )


def network(
    model: str,
    set: list[str] | None,
    input: str | None,
    classes: int | None,
    optimizer: str,
    precision: str = "float32",
) -> Network:
    """Returns what those flags say.

    Raises:
        ConfigurationError: They say nothing.
    """
    shape, usual_classes = _USUAL.get(model, _IMAGES)
    if input is not None:
        try:
            shape = tuple(int(part) for part in input.split(","))
        except ValueError:
            raise ConfigurationError(f"--input {input}: expected numbers like 224,224,3.") from None
    settings: dict[str, Any] = {}
    for word in set or ():
        name, is_one, text = word.partition("=")
        if not is_one:
            raise ConfigurationError(f"--set {word}: expected NAME=VALUE.")
        settings[name] = yaml.safe_load(text)
    return Network(model, shape, classes or usual_classes, optimizer, precision, settings)


def tiny() -> Network:
    """Returns a network that is trained in a moment, for smoke runs."""
    return Network("mlp", (64,), 10)
