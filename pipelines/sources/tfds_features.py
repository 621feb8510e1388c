"""Features of tensorflow-datasets as features of a record: flat, and each with an encoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipelines.errors import DataError
from pipelines.format.feature import Feature, image_format


def keep_images_encoded(features: Any) -> dict[str, Any]:
    """The decoders that leave single images the files they are; nested like the features."""
    from tensorflow_datasets import decode

    decoders: dict[str, Any] = {}
    for name, feature in features.items():
        if _is_dict(feature):
            decoders[name] = keep_images_encoded(feature)
        elif _is_kept_image(feature):
            decoders[name] = decode.SkipDecoding()
    return decoders


def flat_features(features: Any, example: Mapping[str, object]) -> tuple[Feature, ...]:
    """The features of a record.

    Args:
        features: a `tfds.features.FeaturesDict`.
        example: flat; tells how its images are encoded, which the features need not say.

    Raises:
        DataError: a feature cannot be stored in a record.
    """
    return tuple(_feature(name, feature, example[name]) for name, feature in _leaves(features))


def flat_example(example: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """An example with the names of nested features joined by slashes."""
    flat: dict[str, object] = {}
    for name, value in example.items():
        if isinstance(value, Mapping):
            flat |= flat_example(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value.tolist() if _is_text(value) else value
    return flat


def _leaves(features: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each feature that is an array: its flat name, and the feature or what is known of it."""
    for name, feature in features.items():
        if _is_dict(feature):
            yield from _leaves(feature, f"{prefix}{name}/")
        else:
            # A sequence of dictionaries is a dictionary of arrays here.
            info = feature.get_tensor_info()
            if isinstance(info, Mapping):
                yield from _leaves_of_info(info, f"{prefix}{name}/")
            else:
                yield prefix + name, feature


def _leaves_of_info(info: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in info.items():
        if isinstance(value, Mapping):
            yield from _leaves_of_info(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _feature(name: str, feature: Any, value: object) -> Feature:
    if _is_kept_image(feature):
        return _image(name, feature, value)
    shape, dtype = tuple(feature.shape), np.dtype(feature.np_dtype).name
    if dtype in ("object", "str", "bytes"):
        dtype, encoding = "string", "bytes"
    else:
        # Other readers understand a list; it costs more than raw bytes for anything large, and
        # cannot hold float64.
        listed = None in shape or (not shape and dtype != "float64")
        encoding = "list" if listed else "raw"
    names = getattr(feature, "names", None) or ()
    try:
        return Feature.model_validate(
            {
                "name": name,
                "dtype": dtype,
                "shape": shape,
                "encoding": encoding,
                "label_names": tuple(names),
            }
        )
    except ValueError:
        raise DataError(
            f"feature {name!r}: cannot store {dtype} of shape {shape} in a record: only the "
            "first dim and the size of single images may differ"
        ) from None


def _image(name: str, feature: Any, value: object) -> Feature:
    height, width, channels = feature.shape
    return Feature.model_validate(
        {
            "name": name,
            "dtype": np.dtype(feature.np_dtype).name,
            "shape": (height, width, channels or 3),
            "encoding": image_format(value) if isinstance(value, bytes) else None,
        }
    )


def _is_dict(feature: Any) -> bool:
    from tensorflow_datasets import features

    return isinstance(feature, features.FeaturesDict)


def _is_kept_image(feature: Any) -> bool:
    """Whether a feature is a single image of whole numbers; floats are bits in disguise."""
    from tensorflow_datasets import features

    return isinstance(feature, features.Image) and np.dtype(feature.np_dtype).kind == "u"


def _is_text(value: Any) -> bool:
    """Whether a value is an array of bytes, which nothing but Python's own objects can hold."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "OSU"
