"""What tensorflow-datasets leaves beside its shards: dtypes, shapes and label names.

Read from its `features.json` and `*.labels.txt` as they are, without tensorflow-datasets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines.errors import DataError
from pipelines.format.feature import Feature

_FEATURES = "features.json"
Shape = tuple[int | None, ...]


def refine(features: Mapping[str, Feature], folder: Path) -> dict[str, Feature]:
    """Features as declared beside the shards, where the records bear it out.

    Args:
        features: by name, as the records alone tell.
        folder: where the shards lie.

    Raises:
        DataError: the declaration is no JSON.
    """
    path = folder / _FEATURES
    if not path.is_file():
        return dict(features)
    try:
        declared = dict(_declared(json.loads(path.read_bytes()), "", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the features of tensorflow-datasets: {error!r}") from None
    refined = {}
    for name, feature in features.items():
        labels = folder / f"{name.replace('/', '-')}.labels.txt"
        fields = declared.get(name, {})
        if "label_names" in fields and labels.is_file():
            fields["label_names"] = tuple(labels.read_text("utf-8").splitlines())
        refined[name] = _refined(feature, fields)
    return refined


def _refined(feature: Feature, fields: Mapping[str, object]) -> Feature:
    """The feature with the declared fields, or as it was if they cannot be."""
    fields = dict(fields)
    if feature.is_image:
        fields = {key: value for key, value in fields.items() if key == "shape"}
        shape = fields.get("shape")
        if not isinstance(shape, tuple) or len(shape) != 3 or shape[2] is None:
            return feature
    if feature.encoding == "list" and fields.get("dtype") == "float64":
        fields["dtype"] = "float32"  # all that a FloatList kept
    try:
        return Feature.model_validate(feature.model_dump() | fields)
    except ValidationError:
        return feature


def _declared(
    node: Mapping[str, Any], prefix: str, shape: Shape
) -> Iterator[tuple[str, dict[str, object]]]:
    """The fields of each feature by its name in the record; `shape` is that of sequences around.

    The kinds are those of `feature.proto` of tensorflow-datasets. One that is not known here is
    left out: what its records tell has to do.
    """
    if "featuresDict" in node:
        for name, inner in node["featuresDict"]["features"].items():
            yield from _declared(inner, f"{prefix}{name}/", shape)
        return
    name = prefix.removesuffix("/")
    if "sequence" in node:
        length = int(node["sequence"].get("length", -1))
        outer = (*shape, length if length >= 0 else None)
        yield from _declared(node["sequence"]["feature"], prefix, outer)
    elif "classLabel" in node:
        yield name, {"dtype": "int64", "shape": shape, "label_names": ()}
    elif "image" in node:
        yield name, {"shape": (*shape, *_shape(node["image"]))}
    elif "boundingBox" in node:
        yield name, {"shape": (*shape, *_shape(node["boundingBox"]))}
    elif "tensor" in node:
        tensor = node["tensor"]
        fields: dict[str, object] = {"shape": (*shape, *_shape(tensor))}
        if tensor.get("encoding", "none") == "none":
            yield name, fields | {"dtype": tensor["dtype"]}
        elif tensor["encoding"] == "bytes":
            yield name, fields | {"dtype": tensor["dtype"], "encoding": "raw"}


def _shape(node: Mapping[str, Any]) -> Shape:
    dims = [int(dim) for dim in node.get("shape", {}).get("dimensions", ())]
    return tuple(dim if dim >= 0 else None for dim in dims)
