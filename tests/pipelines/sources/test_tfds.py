"""tensorflow-datasets itself, with its format on disk and its mock data of image sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

import pipelines
from pipelines import DataError
from pipelines.index.__main__ import main as index
from pipelines.pack.__main__ import main as pack
from tests.support import opened

NUM_TRAIN, NUM_TEST = 50, 7


class TinyDigits(tfds.core.GeneratorBasedBuilder):
    """The digits of scikit-learn, with features of every kind that a record can store."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        features = tfds.features
        return tfds.core.DatasetInfo(
            builder=self,
            features=features.FeaturesDict(
                {
                    "image": features.Image(shape=(8, 8, 1)),
                    "label": features.ClassLabel(names=[f"digit {i}" for i in range(10)]),
                    "number": np.int64,
                    "inner": {"text": features.Text(), "double": np.float64},
                    "matrix": features.Tensor(shape=(2, 3), dtype=np.float32),
                    "packed": features.Tensor(shape=(2,), dtype=np.float32, encoding="bytes"),
                    "vector": features.Sequence(np.int64),
                    "boxes": features.Sequence({"box": features.BBoxFeature(), "of": np.int64}),
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {
            "train": self._generate_examples(range(NUM_TRAIN)),
            "test": self._generate_examples(range(NUM_TRAIN, NUM_TRAIN + NUM_TEST)),
        }

    def _generate_examples(self, numbers: range) -> Iterator[tuple[int, dict[str, Any]]]:
        images, labels = load_digits(return_X_y=True)
        for i in numbers:
            box = tfds.features.BBox(0.0, 0.25, 0.5, 1.0)
            yield (
                i,
                {
                    "image": images[i].reshape(8, 8, 1).astype(np.uint8),
                    "label": int(labels[i]),
                    "number": i,
                    "inner": {"text": f"größer {i}", "double": i / 3},
                    "matrix": np.full((2, 3), i, np.float32),
                    "packed": np.full(2, i / 4, np.float32),
                    "vector": list(range(i % 4)),
                    "boxes": [{"box": box, "of": i}] * (i % 3),
                },
            )


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tfds")
    TinyDigits(data_dir=folder).download_and_prepare()
    return folder


def expect(example: dict[str, Any]) -> None:
    """Asserts that an example has the values that the builder derived from its number."""
    images, labels = load_digits(return_X_y=True)
    i = int(example["number"])
    np.testing.assert_array_equal(example["image"][..., 0], images[i].reshape(8, 8))
    assert example["label"] == labels[i]
    assert example["inner/text"] == f"größer {i}".encode()
    assert example["inner/double"] == np.float32(i / 3)  # the precision of its format
    np.testing.assert_array_equal(example["matrix"], np.full((2, 3), i))
    np.testing.assert_array_equal(example["packed"], np.full(2, i / 4))
    np.testing.assert_array_equal(example["vector"], range(i % 4))
    np.testing.assert_array_equal(example["boxes/of"], [i] * (i % 3))
    np.testing.assert_array_equal(
        example["boxes/box"], np.tile([0, 0.25, 0.5, 1], (i % 3, 1)).reshape(-1, 4)
    )


def test_every_feature_is_restored(data_dir: Path) -> None:
    source = opened.source("tfds:tiny_digits", data_dir=str(data_dir))
    assert opened.features(source)["image"] == ("uint8", (8, 8, 1), "png")
    result = opened.examples(source)
    assert sorted(int(e["number"]) for e in result) == list(range(NUM_TRAIN))
    for example in result:
        expect(example)


@pytest.mark.parametrize(
    ("split", "num"), [("test", 7), ("train[:10]", 10), ("train[50%:]+test", 25 + 7)]
)
def test_splits_and_slices(data_dir: Path, split: str, num: int) -> None:
    source = opened.source("tfds:tiny_digits", data_dir=str(data_dir), split=split)
    numbers = {int(e["number"]) for e in opened.examples(source)}
    assert len(source) == len(numbers) == num


def test_packed_and_read_back(data_dir: Path, tmp_path: Path) -> None:
    command = ["tfds:tiny_digits", str(tmp_path / "packed"), "--data-dir", str(data_dir)]
    assert pack([*command, "--num-shards", "3", "--num-workers", "1"]) == 0
    seen = 0
    for batch in pipelines.read(tmp_path / "packed", 8).as_numpy_iterator():
        for row in range(len(batch["number"])):
            expect({name: values[row] for name, values in batch.items()})
            seen += 1
    assert seen == NUM_TRAIN


def test_existing_shards_are_indexed_and_read_in_place(data_dir: Path, tmp_path: Path) -> None:
    shards = data_dir / "tiny_digits" / "1.0.0"
    command = [str(shards), "--files", "*-train*", "--to", str(tmp_path), "--num-workers", "1"]
    assert index(command) == 0
    results = {f.name: f for f in pipelines.load_index(tmp_path).features}
    assert results["label"].label_names[3] == "digit 3"
    assert results["matrix"].shape == (2, 3)
    assert results["packed"].encoding == "raw"
    for batch in pipelines.read(tmp_path, 8).as_numpy_iterator():
        for row in range(len(batch["number"])):
            expect({name: values[row] for name, values in batch.items()})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiny_digits", {"split": "validation"}, "--split: expected one of .*'test', 'train'"),
        ("tiny_digitz", {}, "tfds:tiny_digitz: no data set of this name"),
        ("mnist", {}, "tfds:mnist: not prepared in .*/mnist/.*; prepare it there"),
    ],
)
def test_missing_source_is_reported(
    data_dir: Path, name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        opened.source(f"tfds:{name}", data_dir=str(data_dir), **options)


def test_damaged_record_is_named(data_dir: Path, tmp_path: Path) -> None:
    builder = TinyDigits(data_dir=tmp_path)
    builder.download_and_prepare()
    (path,) = Path(builder.data_dir).glob("*-train*")
    damaged = bytearray(path.read_bytes())
    damaged[20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=f"{path}: record at byte 0: checksum of its .* data"):
        opened.examples(opened.source("tfds:tiny_digits", data_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "image", "label", "num_labels"),
    [
        ("cifar10", ("uint8", (32, 32, 3), "png"), "label", 10),
        ("celeb_a", ("uint8", (218, 178, 3), "jpeg"), "attributes/Smiling", 0),
        ("imagenet2012", ("uint8", (None, None, 3), "jpeg"), "label", 1000),
    ],
)
def test_image_datasets(
    name: str, image: tuple[object, ...], label: str, num_labels: int, tmp_path: Path
) -> None:
    command = [f"tfds:{name}", str(tmp_path / name), "--num-shards", "2", "--num-workers", "1"]
    with tfds.testing.mock_data(num_examples=4):
        assert pack(command) == 0
    features = {f.name: f for f in pipelines.load_index(tmp_path / name).features}
    assert (features["image"].dtype, features["image"].shape, features["image"].encoding) == image
    assert len(features[label].label_names) == num_labels
    data = pipelines.read(tmp_path / name, 1, map_fn=lambda example: example["image"])
    assert sum(int(batch.shape[0]) for batch in data) == 4
