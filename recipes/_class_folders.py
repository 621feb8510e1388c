"""Packs and splits your own examples, which are in one folder per class.

Accepted layouts of `--data`:

- `photos/cat/...`, `photos/dog/...`: every fifth example of each class is held out for validation;
- `photos/train/cat/...` with `photos/validation/cat/...` (or `val`, `dev`, `Test`, ...: see
  `pipelines.find_splits`), which `--set splits=none` or `train=Trn,validation=Tst` overrules;
- either of them after `python -m pipelines.pack`: a packed folder, or one with packed splits;
- the URL of packed splits, such as `s3://bucket/photos`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import pipelines
import tfdist
from pipelines.storage import AnyPath, is_url
from recipes import _settings
from tfdist import data
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, DataError
from tfdist.model_setup.build import root_cause

_INDEX, _ACCOUNT = "index.json", "account.json"
_HELD_OUT = 0.2  # fraction of each class
_RECORDS_PER_SHARD, _MAX_SHARDS = 256, 16


class ClassFolders(NamedTuple):
    """Packed examples, split for training and validation.

    Attributes:
        train: The folder of the training split's shards.
        validation: The folder of the validation split's shards.
        classes: Names of the classes, in the order of their labels.
    """

    train: AnyPath
    validation: AnyPath
    classes: tuple[str, ...]


def prepare(config: TrainConfig, name: str, small: data.Small, **pack_options: Any) -> ClassFolders:
    """Returns the packed splits of `config.data`, and packs them on the first call.

    Args:
        config: `data` names the examples, `data_dir` the cache for their packed copy.
        name: Name of the recipe; its folder in the cache has the same name.
        small: The data set of `--data small`.
        **pack_options: Options of `pipelines.pack_dataset`.

    Raises:
        ConfigurationError: `config.data` is not set, or names no folder.
        DataError: There are no examples, fewer than two classes, or splits with different classes.
    """
    cache = Path(config.data_dir) / name
    if config.data and (config.data == data.SMALL or is_url(config.data)):
        data_set = data.DataSet(name=name, small=small)
        splits = [data.folder(config, data_set, split) for split in ("train", "validation")]
        return _check_classes(config.data, *splits)
    if config.data is None or not Path(config.data).is_dir():
        raise ConfigurationError(
            f"--data {config.data}: expected a folder with one subfolder per class, for example "
            "photos/cat and photos/dog. To try the recipe without data, use --data small."
        )
    try:
        folders, account = _prepare(config.data, str(cache), tuple(sorted(pack_options.items())))
    except pipelines.DataError as error:
        raise DataError(_settings.in_settings(str(error))) from error
    except tf.errors.OpError as error:  # a damaged record of a packed folder
        raise DataError(root_cause(error)) from error
    if account and tfdist.is_chief() and config.verbose != 0:
        _print_once(account)
    return folders


@functools.lru_cache(maxsize=4)
def _print_once(account: str) -> None:
    print(account)


@functools.lru_cache(maxsize=4)
def _prepare(
    location: str, cache: str, pack_options: tuple[tuple[str, Any], ...]
) -> tuple[ClassFolders, str]:
    """Returns the packed splits, and what became of the files as text."""
    source, options = Path(location), dict(pack_options)
    if source.name == "train" and (source / _INDEX).is_file():
        source = source.resolve().parent  # the other split is beside it
    # Changed files or options need a new folder, because a packed copy is never updated.
    below = Path(cache) / f"{data.cache_name(location)}-{_fingerprint(source, pack_options)}"
    splits = options.pop("splits", None)
    found = {} if splits == "none" else pipelines.find_splits(source, splits)
    folders = {split: Path(str(folder)) for split, folder in found.items()}
    options["splits"] = "none"
    train = folders.get("train", source)
    test, validation = folders.get("test"), folders.get("validation")
    if test and not validation and test.name != "test":
        raise pipelines.DataError(
            f"{source}: contains {test.name} and no folder for validation; to validate with it, "
            f"pass --splits train={train.name},validation={test.name}, and to hold out a part of "
            f"{train.name} instead, pass --data {train}"
        )
    validation = validation or test
    if validation and train == source:
        raise pipelines.DataError(
            f"{source}: expected a folder of training examples beside {validation.name}, found "
            "none; call it train, or pass --splits none if all are classes"
        )
    account = pipelines.Account()
    if validation:
        sources = {"train": train, "validation": validation}
        parts = {name: _pack(part, below / name, options) for name, part in sources.items()}
        of_part = {name: set(_classes(part)) for name, part in parts.items()}
        union = set().union(*of_part.values())
        for name, classes in of_part.items():
            missing = sorted(union - classes) if classes else []
            account.change("classes", f"have no examples in {name}", *missing)
            if missing and parts[name] != sources[name]:  # else it is packed already
                every = options | {"classes": tuple(sorted(union))}
                parts[name] = _pack(sources[name], below / f"{name}-of-all", every)
        packed = (parts["train"], parts["validation"])
    else:
        packed = _hold_out(train, below, options)
    for folder in packed if validation else packed[:1]:
        account.merge(pipelines.load_account(folder))
    if account and (read := [train, validation] if validation else [train]):
        rest = [f for f in pipelines.list_files(source) if not any(map(f.is_relative_to, read))]
        names = [path.relative_to(source) for path in rest]
        account.leave_out("files", "in no split that is read", *names)
    return _check_classes(location, *packed), str(account)


def _check_classes(location: str, train: AnyPath, validation: AnyPath) -> ClassFolders:
    """Returns both folders with their classes.

    Raises:
        DataError: There are fewer than two classes, or the splits have different ones.
    """
    classes, others = _classes(train), _classes(validation)
    if len(classes) < 2:
        raise DataError(
            f"--data {location}: expected at least 2 classes, found {len(classes)} "
            f"{list(classes)}. Create one subfolder per class."
        )
    if classes != others:
        raise DataError(
            f"--data {location}: the training split has the classes {list(classes)}, the "
            f"validation split {list(others)}. Use the same subfolders in both."
        )
    if not pipelines.load_index(validation).num_records:
        counts = class_counts(train, len(classes))
        few = ", ".join(f"{name} has {n}" for name, n in zip(classes, counts, strict=True))
        raise DataError(
            f"--data {location}: no class has the 3 examples of which one can be held out for "
            f"validation ({few}). Add examples, or a folder validation with the same subfolders."
        )
    return ClassFolders(train, validation, classes)


def _classes(folder: AnyPath) -> tuple[str, ...]:
    labels = [f for f in pipelines.load_index(folder).features if f.name == "label"]
    return labels[0].label_names if labels else ()


def _pack(source: Path, target: Path, options: Mapping[str, Any]) -> Path:
    """Returns the folder of a split's shards: the source itself if it is packed."""
    if (source / _INDEX).is_file():
        return source
    if not (target / _INDEX).is_file():
        pipelines.pack_dataset(str(source), target, **options)
    return target


def _hold_out(source: Path, below: Path, options: Mapping[str, Any]) -> tuple[Path, Path]:
    """Returns folders with the training examples and with the held-out ones."""
    train, validation = below / "train", below / "validation"
    if not all((folder / _INDEX).is_file() for folder in (train, validation)):
        whole = _pack(source, below / "all", options)
        index = pipelines.load_index(whole)
        for folder in (train, validation):
            pipelines.write_shards(
                _examples_of(whole, held_out=folder == validation),
                folder,
                index.features,
                num_shards=min(max(index.num_records // _RECORDS_PER_SHARD, 1), _MAX_SHARDS),
                source=f"{index.source}, {folder.name}, one in five of each class held out",
            )
            if (whole / _ACCOUNT).is_file():
                shutil.copyfile(whole / _ACCOUNT, folder / _ACCOUNT)
        shutil.rmtree(below / "all", ignore_errors=True)
    return train, validation


def _examples_of(folder: Path, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Returns the training examples of a packed folder, or every fifth of each class."""
    seen: Counter[int] = Counter()
    records = pipelines.read(folder, 1, decode_images=False).unbatch()
    for record in records.as_numpy_iterator():
        label = int(record.get("label", 0))
        number = seen[label]
        seen[label] += 1
        is_held_out = int(number * _HELD_OUT + 0.5) < int((number + 1) * _HELD_OUT + 0.5)
        if is_held_out == held_out:
            yield record


def _fingerprint(folder: Path, options: object) -> str:
    """Returns a short text that changes with names, sizes and times of files, and with options."""
    digest = hashlib.sha256(repr(options).encode())
    for path in pipelines.list_files(folder):
        status = path.stat()
        digest.update(os.fsencode(f"{path.relative_to(folder)}\0{status.st_size}\0"))
        digest.update(f"{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:8]


def with_class_weights(batches: tf.data.Dataset, folders: ClassFolders) -> tf.data.Dataset:
    """Adds sample weights that balance the classes in the loss.

    Args:
        batches: Batches of inputs and one-hot labels. The weight of a mixed label is the mean of
            its classes' weights.
        folders: The classes, and the training split whose class frequencies determine the weights.
    """
    counts = class_counts(folders.train, len(folders.classes))
    weights = tf.constant(balanced_weights(counts))
    return batches.map(lambda x, y: (x, y, tf.linalg.matvec(y, weights)))


def class_counts(folder: AnyPath, num_classes: int) -> np.ndarray:
    """Returns the number of records of each class, int64 `(num_classes,)`."""
    labels = pipelines.read(
        folder, 1024, decode_images=False, map_fn=lambda record: {"label": record["label"]}
    )
    counts = np.zeros(num_classes, np.int64)
    for batch in labels.as_numpy_iterator():
        counts += np.bincount(batch["label"], minlength=num_classes)
    return counts


def balanced_weights(counts: np.ndarray) -> np.ndarray:
    """Returns a weight per class, inversely proportional to its number of examples.

    As `class_weight="balanced"` of scikit-learn: `num_examples / (num_classes * counts)`.
    """
    return (counts.sum() / (len(counts) * np.maximum(counts, 1))).astype("float32")
