"""Image tables of Hugging Face's `datasets` are packed with their images and class names."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from pipelines import DataError
from tests.support import opened, pictures


def test_image_table_of_hugging_face(tmp_path: Path) -> None:
    """Images are structs of bytes and path, and the metadata name the classes."""
    encoded = [pictures.encoded(i) for i in range(3)]
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
    }
    table = pa.table(
        {
            "image": [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(encoded)],
            "label": [0, 1, 0],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    source = opened.source(tmp_path)
    image, label = source.features
    assert (image.encoding, image.shape) == ("png", (None, None, 3))
    assert (label.encoding, label.label_names) == ("list", ("cat", "dog"))
    assert list(source.examples([2, 1])) == [
        {"image": encoded[2], "label": 0},
        {"image": encoded[1], "label": 1},
    ]
    small = opened.source(tmp_path, image_size="4x4", image_format="jpeg")
    assert small.features[0].shape == (4, 4, 3)
    (example,) = small.examples([0])
    assert bytes(example["image"]).startswith(b"\xff\xd8")  # type: ignore[call-overload]


def test_image_options_need_images(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match="has no images"):
        opened.source(tmp_path, image_size="4x4")
