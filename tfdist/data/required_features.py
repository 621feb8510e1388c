"""Checks that a data set has the features and the number of classes that a recipe expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pipelines
from tfdist.errors import DataError

_CURE = (
    "Use --recipe image_folder, table or text_classifier, which take their features and classes "
    "from the data, or use other data."
)


def check_features(
    features: Sequence[pipelines.Feature], required: Mapping[str, int | None], data: str, user: str
) -> None:
    """Checks the features of records against those that a recipe reads.

    Args:
        features: Features of the records.
        required: As `DataSet.features`.
        data: The name of the data, for the message.
        user: The name of what reads them, for the message.

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
