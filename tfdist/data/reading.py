"""Reads the batches of a recipe from the location in `--data`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import pipelines
from pipelines.storage import AnyPath, at, is_url
from tfdist.config import TrainConfig
from tfdist.data import synthetic
from tfdist.data.data_set import SMALL, SYNTHETIC, DataSet, check_features
from tfdist.errors import DataError

_NUM_SMALL_SHARDS = 4
_INDEX = "index.json"
_MOST_NAMES = 3
#: File systems take names of 255 bytes; some are left for what is added to it.
_LONGEST_NAME = 150


def read(
    config: TrainConfig,
    data_set: DataSet,
    split: str,
    *,
    batch_fn: Callable[..., Any] | None = None,
    shuffle_buffer: int = 10_000,
    augment_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> tf.data.Dataset:
    """Reads a split in global batches.

    Args:
        config: Configuration of the data, the batch size, and the seed of order and augmentation.
        data_set: The data set of the recipe.
        split: `"train"`, which is shuffled and augmented, or `"validation"`, which is neither.
        batch_fn: Maps a batch, of noise too.
        shuffle_buffer: Number of examples that are shuffled together.
        augment_fn: Augments a training example.
        **options: Further arguments of `pipelines.read`. Their functions are not applied to noise,
            which already has the structure of their results.

    Raises:
        DataError: The data are not available; the message names alternatives.
    """
    if config.data == SYNTHETIC:
        few = synthetic.batches(
            data_set.noise, config.batch_size, data_set.num_examples[split], config.seed
        )
        return few.map(batch_fn, tf.data.AUTOTUNE) if batch_fn else few
    trains = split == "train"
    tuning = with_flags(options.pop("tuning", pipelines.Tuning()), config)
    return pipelines.read(
        folder(config, data_set, split),
        config.batch_size,
        shuffle_buffer=shuffle_buffer if trains else 0,
        seed=config.seed,
        augment_fn=augment_fn if trains else None,
        batch_fn=batch_fn,
        tuning=tuning,
        **options,
    )


def with_flags(tuning: pipelines.Tuning, config: TrainConfig) -> pipelines.Tuning:
    """Returns the tuning with the values of `--read-ahead` and `--cache-dir`, if they are given."""
    if config.read_ahead is not None:
        tuning = tuning._replace(read_ahead_bytes=config.read_ahead)
    if config.cache_dir is not None:
        tuning = tuning._replace(cache_dir=config.cache_dir)
    return tuning


def folder(config: TrainConfig, data_set: DataSet, split: str) -> AnyPath:
    """Returns the folder of a split's shards, and packs them first if they are missing.

    Raises:
        DataError: The data are not available, or lack a feature that the recipe reads; the message
            names alternatives.
    """
    directory = _folder(config, data_set, split)
    if config.data != SMALL:
        check_features(
            pipelines.load_index(directory).features,
            data_set.features,
            f"--data {config.data}",
            f"recipe {config.recipe!r}",
        )
    return directory


def _folder(config: TrainConfig, data_set: DataSet, split: str) -> AnyPath:
    below = Path(config.data_dir) / data_set.name
    if config.data == SYNTHETIC:
        raise DataError(
            f"--data synthetic: {data_set.name} has no synthetic data. Use --data small."
        )
    if config.data == SMALL:
        directory = below / "small" / split
        if data_set.small is None:
            raise DataError(
                f"--data small: {data_set.name} has no small data set. Use --data synthetic."
            )
        small = data_set.small
        pipelines.write_shards(
            small.examples(split),
            directory,
            small.features,
            num_shards=_NUM_SMALL_SHARDS,
            source=f"{small.what}, {split}",
        )
        return directory
    source, options = str(config.data), dict(data_set.options)
    if is_url(source):
        return _remote(at(source), data_set, split)
    root = _root(Path(source), data_set)
    folders = {name: _split_folder(root, name) for name in data_set.splits}
    of_split = folders[split]
    if (of_split / _INDEX).is_file():
        return of_split  # already packed
    names = [str(path) for path in folders.values() if path.is_dir()]
    if len(names) == len(folders):
        source = str(of_split)
    elif not names and _has_class_folders(root):
        both = " and ".join(folders)
        raise DataError(
            f"--data {source}: recipe {config.recipe!r} needs the folders {both} in it, found "
            f"{_listed(root)}. Move the class folders into them, or use --recipe image_folder or "
            "text_classifier, which divide class folders themselves."
        )
    elif (
        names
        and all(_has_class_folders(Path(path)) for path in names)
        and all(entry.is_dir() for entry in root.iterdir())
    ):
        both = " and ".join(folders)
        raise DataError(
            f"--data {source}: recipe {config.recipe!r} needs the folders {both} in it, found only "
            f"{_listed(root)}. Add the other one, or use --recipe image_folder or text_classifier, "
            "which divide class folders themselves."
        )
    else:
        options["split"] = data_set.splits[split]
    name = cache_name(str(config.data))
    try:
        pipelines.pack_dataset(source, below / name / split, **options)
    except pipelines.DataError as error:
        stand_in = f"{SMALL} or {SYNTHETIC}" if data_set.small else SYNTHETIC
        both = " and ".join(data_set.splits)
        splits = f"Found only {', '.join(names)}. " if names else ""
        # Recipes have no such flags.
        flags = f"Its flags: python -m pipelines.pack {source} DEST. " if "--" in str(error) else ""
        raise DataError(
            f"{error}\n{flags}{splits}Use --data {stand_in}, or a folder that contains {both}."
        ) from error
    return below / name / split


def cache_name(location: str) -> str:
    """Returns a name for a folder in the cache, which no file system finds too long."""
    name = re.sub(r"\W+", "-", location).strip("-")
    if len(os.fsencode(name)) <= _LONGEST_NAME:
        return name
    return hashlib.sha256(os.fsencode(location)).hexdigest()[:32]


def _has_class_folders(root: Path) -> bool:
    """Returns whether a folder contains only folders of files: one per class, as for images."""
    entries = list(root.iterdir()) if root.is_dir() else []
    return bool(entries) and all(
        entry.is_dir() and not any(one.is_dir() for one in entry.iterdir()) for entry in entries
    )


def _listed(root: Path) -> str:
    names = sorted(entry.name for entry in root.iterdir())
    return ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    )


def _remote(source: AnyPath, data_set: DataSet, split: str) -> AnyPath:
    """Returns the packed folder of a split in a bucket, beside `source` if that is one split."""
    root = source.parent if (source / _INDEX).is_file() else source
    names = [split] if split != "validation" else [split, "val", "valid"]
    for name in names:
        if (root / name / _INDEX).is_file():
            return root / name
    both = " and ".join(data_set.splits)
    raise DataError(
        f"--data {source}: expected the packed folders {both} below {root}, found no "
        f"{root / split / _INDEX}. Pack each split with: python -m pipelines.pack SRC "
        f"{root / split}"
    )


def _root(source: Path, data_set: DataSet) -> Path:
    """Returns the parent of the splits' folders, also if `source` is the packed folder of one."""
    if not (source / _INDEX).is_file():
        return source
    root = source.resolve().parent
    if all((_split_folder(root, name) / _INDEX).is_file() for name in data_set.splits):
        return root
    both = " and ".join(data_set.splits)
    raise DataError(
        f"--data {source}: this packed folder has only one split; the recipe needs {both}. "
        f"Pack each split to a folder with its name (such as {root}/train), and use --data {root}."
    )


def _split_folder(root: Path, split: str) -> Path:
    """Returns the folder of a split. `val` and `valid` are accepted for `validation`."""
    for name in ("val", "valid") if split == "validation" else ():
        path = root / name
        has_content = (path / _INDEX).is_file() or any(p.is_dir() for p in path.glob("*"))
        if has_content and not (root / split).is_dir():
            return path
    return root / split
