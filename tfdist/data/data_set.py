"""`DataSet`: a recipe's description of its data, and the check that data have its features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pipelines
from tfdist.config import TrainConfig
from tfdist.errors import DataError

#: Values of `--data` that are not locations.
SYNTHETIC, SMALL = "synthetic", "small"
_CURE = (
    "Use --recipe image_folder, table or text_classifier, which take their features and classes "
    "from the data, or use other data."
)


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


def check_features(
    features: Sequence[pipelines.Feature], required: Mapping[str, int | None], data: str, user: str
) -> None:
    """Checks the features of records against those that a recipe reads.

    Raises:
        DataError: A feature is missing, or has another number of classes, elements or columns.
    """
    names = ", ".join(feature.name for feature in features)
    for name, expected in required.items():
        columns = [f for f in features if f.name == name or f.name.startswith(f"{name}/")]
        if not columns:
            number = f"{expected} of them, found 0" if expected else "it"
            raise DataError(
                f"{data}: the records have no feature {name!r}, and {user} needs {number}. "
                f"Features of these records: {names}. {_CURE}"
            )
        size, what = _size(columns)
        if expected is not None and size not in (None, expected):
            raise DataError(
                f"{data}: feature {name!r} has {size} {what}, and {user} builds a network for "
                f"{expected}. {_CURE}"
            )


def _size(columns: Sequence[pipelines.Feature]) -> tuple[int | None, str]:
    """Returns the number of classes, elements or columns, where the features tell, and its unit."""
    feature, *others = columns
    if others or "/" in feature.name:
        return len(columns), "columns"
    if feature.label_names:
        names = feature.label_names
        return len(names), f"classes ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    return (feature.shape[0], "elements") if len(feature.shape) == 1 else (None, "")
