"""Ways to pass data to `fit` and `evaluate`, and variants of a case with other rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support import forms
from tests.support.case import Case
from tests.support.data import Data

Arguments = dict[str, Any]


def _num_rows(data: Data) -> int:
    return len(keras.tree.flatten(data.x)[0])


def _take(data: Data, index: np.ndarray) -> Data:
    """Returns the rows of the data at `index`."""

    def take(values: Any) -> Any:
        return keras.tree.map_structure(lambda array: array[index], values)

    return Data(
        take(data.x),
        None if data.y is None else take(data.y),
        None if data.sample_weight is None else take(data.sample_weight),
    )


def _parts(data: Data) -> tuple[Any, ...]:
    """Returns the data as the tuple that Keras expects from a dataset or generator."""
    parts = (data.x, data.y, data.sample_weight)
    return tuple(part for part in parts if part is not None)


def _arrays(case: Case) -> Arguments:
    return {**dataclasses.asdict(case.data), "batch_size": case.batch_size}


def _dataset(case: Case) -> Arguments:
    return {"x": forms.sliced(*_parts(case.data), size=case.batch_size)}


def _unknown_length(case: Case) -> Arguments:
    """A dataset of unknown cardinality, as when reading a file."""
    dataset = tf.data.Dataset.from_tensor_slices(_parts(case.data))
    return {"x": dataset.filter(lambda *_: True).batch(case.batch_size)}


def _endless(case: Case) -> Arguments:
    return {"x": _dataset(case)["x"].repeat()}


def _generator(case: Case) -> Arguments:
    def batches() -> Iterator[tuple[Any, ...]]:
        while True:
            yield from forms.generated(*_parts(case.data), size=case.batch_size)

    return {"x": batches()}


def _laid_out(case: Case) -> Arguments:
    """A dataset of precomputed batches, the fastest to start because nothing is traced."""
    batches = forms.generated(*_parts(case.data), size=case.batch_size)
    datasets = map(tf.data.Dataset.from_tensors, batches)
    return {"x": functools.reduce(tf.data.Dataset.concatenate, datasets)}


FEEDS: dict[str, Callable[[Case], Arguments]] = {
    "arrays": _arrays,
    "dataset": _dataset,
    "unknown length": _unknown_length,
    "endless": _endless,
    "generator": _generator,
    "pydataset": lambda case: {"x": forms.Batches(*_parts(case.data), size=case.batch_size)},
    "data set": lambda case: {"x": case.data.x()},
    "laid out": _laid_out,
}


def fit_arguments(case: Case) -> Arguments:
    """Returns the keyword arguments of `fit` for a case, including its data."""
    data = FEEDS[case.feed](case)
    return {**data, "epochs": case.epochs, "shuffle": False, "verbose": 0, **case.fit}


def evaluate_arguments(case: Case) -> Arguments:
    """Returns the keyword arguments of `evaluate` for a case, including its data."""
    data = FEEDS[case.feed](case)
    return {**data, "verbose": 0, "return_dict": True, **case.evaluate}


def predict_arguments(case: Case) -> Arguments:
    """Returns the keyword arguments of `predict` for a case."""
    if case.feed == "data set":
        return {"x": case.data.x(), "verbose": 0}
    return {"x": case.data.x, "batch_size": case.batch_size, "verbose": 0}


def laid_out(case: Case) -> Case:
    """Returns the case with precomputed batches, unless the case tests its feed."""
    parts = (case.data.x, case.data.y, case.data.sample_weight)
    of_arrays = {"validation_split", "class_weight", "batch_size"} & {*case.fit, *case.evaluate}
    if case.feed not in ("arrays", "dataset") or of_arrays or list in map(type, parts):
        return case  # a dataset treats a list as one tensor
    fit = dict(case.fit)
    if "validation_data" in fit:
        fit.setdefault("validation_batch_size", case.batch_size)
    return dataclasses.replace(case, feed="laid out", fit=fit)


def permuted(case: Case) -> Case:
    """Returns the case with permuted rows in every batch; the results must stay the same."""
    random = np.random.default_rng(0)
    batches, rest = _batches(case)
    index = np.concatenate([*(random.permutation(batch) for batch in batches), rest])
    return dataclasses.replace(case, data=_take(case.data, index))


def half_lost(case: Case) -> Case:
    """Returns the case without half the rows of every batch, as if a replica were ignored."""
    batches, rest = _batches(case)
    index = np.concatenate([batch[: max(1, len(batch) // 2)] for batch in batches])
    fit = dict(case.fit)
    if fit.pop("validation_split", None):
        fit["validation_data"] = _parts(_take(case.data, rest))
    return dataclasses.replace(
        case, data=_take(case.data, index), batch_size=case.batch_size // 2, fit=fit
    )


def even(case: Case, num_replicas: int) -> Case:
    """Returns the case with batches that all divide by the number of replicas."""

    def multiple(number: int, of: int) -> int:
        return number - number % of

    batch_size = multiple(case.batch_size, num_replicas)
    batches, rest = _batches(case)
    index = np.arange(multiple(sum(map(len, batches)), batch_size))
    fit = dict(case.fit)
    if fit.pop("validation_split", None):
        fit["validation_data"] = _parts(_take(case.data, rest))
    if "validation_data" in fit:
        validation = Data(*fit["validation_data"])
        keep = np.arange(multiple(_num_rows(validation), batch_size))
        fit |= {
            "validation_data": _parts(_take(validation, keep)),
            "validation_batch_size": batch_size,
        }
    evaluate = {name: value for name, value in case.evaluate.items() if name != "batch_size"}
    data = _take(case.data, index)
    return dataclasses.replace(case, data=data, batch_size=batch_size, fit=fit, evaluate=evaluate)


def _batches(case: Case) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the rows of each training batch, and those that `validation_split` takes."""
    num_train = math.floor(_num_rows(case.data) * (1.0 - case.fit.get("validation_split", 0.0)))
    batches = np.split(np.arange(num_train), range(case.batch_size, num_train, case.batch_size))
    return batches, np.arange(num_train, _num_rows(case.data))
