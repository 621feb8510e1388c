"""`DataSet`: a recipe's description of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pipelines
from tfdist.config import TrainConfig

#: Values of `--data` that are not locations.
SYNTHETIC, SMALL = "synthetic", "small"


@dataclass(frozen=True)
class Small:
    """A small data set that needs no network: it comes with a library or is generated.

    Attributes:
        what: Description in one line.
        features: Features of the examples, with the names of the real data.
        examples: Returns the examples of a split, `"train"` or `"validation"`, always the same.
    """

    what: str
    features: tuple[pipelines.Feature, ...]
    examples: Callable[[str], Iterable[Mapping[str, object]]]


@dataclass(frozen=True)
class DataSet:
    """The data of a recipe.

    Attributes:
        name: Name of the folder in `--data-dir`.
        noise: Structure of a mapped example, with a `Noise` for each tensor; None: the recipe
            generates its own.
        num_examples: Size of the real data by split, which is also the size of an epoch of noise.
        features: The features of a record that the recipe reads, by name, and how many classes,
            elements or columns `NAME/...` each must have; None: any number.
        small: The data of `--data small`, or None.
        splits: Names of the splits in the sources, by the names `"train"` and `"validation"`.
        options: Arguments of `pipelines.pack_dataset` for the real data.
    """

    name: str
    noise: Any = None
    num_examples: Mapping[str, int] = field(default_factory=dict)
    features: Mapping[str, int | None] = field(default_factory=dict)
    small: Small | None = None
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "validation": "validation"}
    )
    options: Mapping[str, Any] = field(default_factory=dict)


def describe(config: TrainConfig) -> str:
    """Returns a description of the data for the start-up table."""
    if config.data == SYNTHETIC:
        return "synthetic: noise with the shapes of the real data, to measure speed only"
    if config.data == SMALL:
        return "small: a small substitute for the real data"
    return str(config.data)
