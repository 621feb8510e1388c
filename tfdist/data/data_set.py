"""What a recipe says of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pipelines
from tfdist.config import TrainConfig

#: The words that `--data` takes besides places.
SYNTHETIC, SMALL = "synthetic", "small"


@dataclass(frozen=True)
class Small:
    """A set that is there without a network: it came with a library, or is made.

    Attributes:
        what: It is, in a line.
        features: Of its examples, named as those of the real data.
        examples: Makes those of a split, `"train"` or `"validation"`, always the same.
    """

    what: str
    features: tuple[pipelines.Feature, ...]
    examples: Callable[[str], Iterable[Mapping[str, object]]]


@dataclass(frozen=True)
class DataSet:
    """Where examples come from.

    Attributes:
        name: Of their folder in `--data-dir`.
        noise: An example as the recipe's maps leave it, with a `Noise` for each of its tensors;
            None: the recipe makes its own.
        num_examples: Of the real data, by split: an epoch of noise is as long.
        small: What `--data small` trains on; None: there is none.
        splits: How the sources call ours.
        options: Of `pipelines.packed`, for the real data.
    """

    name: str
    noise: Any = None
    num_examples: Mapping[str, int] = field(default_factory=dict)
    small: Small | None = None
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "validation": "validation"}
    )
    options: Mapping[str, Any] = field(default_factory=dict)


def describe(config: TrainConfig) -> str:
    """What a run trains on, for the start-up table."""
    if config.data == SYNTHETIC:
        return "synthetic: noise of the real data's shapes, from memory: for speed, not to learn"
    if config.data == SMALL:
        return "small: a set that stands in for the real data"
    return str(config.data)
