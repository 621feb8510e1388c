"""The photographs as a data set of tensorflow-datasets, in its own format on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from tfdist.bench.input.photographs import NUM_CLASSES, Photographs


def builder(made: Photographs) -> Any:
    """The builder, with its files written."""
    found = _Photographs(made.files, data_dir=str(made.shards.parent / "tfds"))
    tfds.disable_progress_bar()
    found.download_and_prepare()
    return found


class _Photographs(tfds.core.GeneratorBasedBuilder):
    """An image folder with labels."""

    VERSION = tfds.core.Version("1.0.0")
    name = "photographs"

    def __init__(self, files: Path, **options: Any) -> None:
        self._files = files
        super().__init__(**options)

    def _info(self) -> Any:
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in sorted(self._files.glob("*/*.jpg")):
            yield path.name, {"image": str(path), "label": int(path.parent.name)}
