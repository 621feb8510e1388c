"""Structures of inputs, outputs, labels, weights, losses, and metrics, against plain Keras.

Cases are drawn at random from all combinations that Keras accepts, more of them in the long form.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.training import assert_close, mirrored

#: From the name of a form to the number of its leaves, and what makes it of them.
FORMS: dict[str, tuple[int, Callable[[list], Any]]] = {
    "bare": (1, lambda v: v[0]),
    "list of one": (1, list),
    "tuple of one": (1, tuple),
    "dict of one": (1, lambda v: {"a": v[0]}),
    "nested one": (1, lambda v: {"p": [v[0]]}),
    "list": (2, list),
    "tuple": (2, tuple),
    "dict": (2, lambda v: {"b": v[0], "a": v[1]}),
    "nested list": (2, lambda v: [v[0], [v[1]]]),
    "nested dict": (2, lambda v: {"p": [v[1]], "q": {"r": v[0]}}),
}
CHOICES: dict[str, list[Any]] = {
    "model": ["functional", "subclass"],
    "inputs": list(FORMS),
    "outputs": list(FORMS),
    "labels": ["same", "bare", "list", "tuple", "by name"],
    "weights": ["none", "one", "same", "list", "some None"],
    "loss": ["one", "function", "list", "same", "by name", "some None", "several", "scalar", "sum"],
    "loss weights": ["none", "list", "same", "by name"],
    "metrics": ["none", "flat", "per output", "by name", "same"],
    "width": [1, 3, 6],  # as many columns as a replica or a batch has rows
    "data": ["arrays", "dataset"],
}
#: Batches of 6 and 5 rows.
ROWS, BATCH = 11, 6
#: The seeds of the cases that the gate runs, and of the others.
FEW, MANY = range(6), range(6, 300)
Case = dict[str, Any]


class Subclass(keras.Model):
    def __init__(self, form: Callable[[list], Any], units: list[int]) -> None:
        super().__init__()
        self.parts, self.form = [dense(i, size) for i, size in enumerate(units)], form

    def call(self, x: Any) -> Any:
        leaves = keras.tree.flatten(x)
        total = leaves[0] if len(leaves) == 1 else leaves[0] + 2 * leaves[1]
        return self.form([part(total) for part in self.parts])


def dense(number: int, units: int) -> layers.Dense:
    initializer = keras.initializers.RandomNormal(seed=number)
    return layers.Dense(units, name=f"out{number}", kernel_initializer=initializer)


def array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def by_name(values: list) -> dict[str, Any]:
    return {f"out{i}": value for i, value in enumerate(values)}


def squares(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)


def compiled_with(case: Case) -> dict[str, Any]:
    """Returns the arguments of `compile`."""
    num, form = FORMS[case["outputs"]]
    losses, weights = ["mse", "mae"][:num], [0.5, 2.0][:num]
    metrics = [["mae"], ["mse"]][:num]
    return {
        "loss": {
            "one": "mse", "function": squares, "list": losses, "same": form(losses),
            "by name": by_name(losses), "some None": form([losses[0], None][:num]),
            "several": ["mse", "mae"], "scalar": lambda t, p: keras.ops.mean(squares(t, p)),
            "sum": keras.losses.MeanSquaredError(reduction="sum"),
        }[case["loss"]],
        "loss_weights": {
            "none": None, "list": weights, "same": form(weights), "by name": by_name(weights),
        }[case["loss weights"]],
        "metrics": {
            "none": None, "flat": ["mae", "mse"], "per output": metrics,
            "by name": by_name(metrics), "same": form(["mae", "mse"][:num]),
        }[case["metrics"]],
        "weighted_metrics": ["mae"] if num == 1 else None,
    }  # fmt: skip


def build(case: Case) -> keras.Model:
    keras.utils.set_random_seed(1)
    num, form = FORMS[case["outputs"]]
    units = [case["width"], 2][:num]
    num_inputs, form_of_inputs = FORMS[case["inputs"]]
    if case["model"] == "functional":
        inputs = [keras.Input((4,), name=f"in{i}") for i in range(num_inputs)]
        x = inputs[0]
        if num_inputs == 2:
            x = layers.Add()([x, layers.Rescaling(2.0)(inputs[1])])
        outputs = form([dense(i, size)(x) for i, size in enumerate(units)])
        model = keras.Model(form_of_inputs(inputs), outputs)
    else:
        model = Subclass(form, units)
    model.compile(keras.optimizers.SGD(0.1), **compiled_with(case))
    return model


def data(case: Case) -> tuple[Any, Any, Any]:
    num, form = FORMS[case["outputs"]]
    num_inputs, form_of_inputs = FORMS[case["inputs"]]
    labels = [array(20, ROWS, case["width"]), array(21, ROWS, 2)][:num]
    weights = [np.abs(array(30 + i, ROWS)) for i in range(num)]
    y = {
        "same": form(labels), "bare": labels[0], "list": labels, "tuple": tuple(labels),
        "by name": by_name(labels),
    }[case["labels"]]  # fmt: skip
    weight = {
        "none": None, "one": weights[0], "same": form(weights), "list": weights,
        "some None": form([weights[0], None][:num]),
    }[case["weights"]]  # fmt: skip
    return form_of_inputs([array(10 + i, ROWS, 4) for i in range(num_inputs)]), y, weight


def results(runner: Any, case: Case) -> Any:
    """Returns what fit, evaluate, predict, and train_on_batch return, and the weights."""
    x, y, weight = data(case)
    given: dict[str, Any] = {"x": x, "y": y, "sample_weight": weight, "batch_size": BATCH}
    order: dict[str, Any] = {"shuffle": False}
    parts = (x, y) if weight is None else (x, y, weight)
    if case["data"] == "dataset":
        given, order = {"x": tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)}, {}
    model = getattr(runner, "model", runner)
    history = runner.fit(**given, **order, epochs=2, verbose=0).history
    scores = runner.evaluate(**given, verbose=0, return_dict=True)
    predicted = keras.tree.flatten(runner.predict(x, batch_size=BATCH, verbose=0))
    first = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:BATCH], parts)
    logs = model.train_on_batch(*first, return_dict=True)
    return history, scores, predicted, logs, model.get_weights()


def case_of(seed: int) -> tuple[Case, Any]:
    """Returns the first random case from a seed on that plain Keras accepts, and its results."""
    rng = random.Random(seed)
    while True:
        case = {name: rng.choice(values) for name, values in CHOICES.items()}
        try:
            return case, results(build(case), case)
        except Exception:
            keras.backend.clear_session()


@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.long) for seed in MANY)]
)
def test_structures_are_those_of_keras(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case, expected = case_of(seed)
        print(case)
        assert_close(results(mirrored(lambda: build(case)), case), expected)


@pytest.mark.filterwarnings("ignore:Full-batch mode")
@pytest.mark.parametrize("model", ["functional", "subclass"])
def test_metrics_broadcast_labels_of_rows_along_columns(model: str) -> None:
    """As many columns as the global batch has rows; those of a replica would not do."""

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        parts = keras.Sequential([keras.Input((4,)), dense(0, BATCH)])
        made = parts if model == "functional" else Subclass(lambda v: v[0], [BATCH])
        made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return made

    def fit(runner: Any) -> Any:
        options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        return runner.fit(array(10, 2 * BATCH, 4), array(20, 2 * BATCH), **options).history

    assert_close(fit(mirrored(build_model)), fit(build_model()))


@pytest.mark.parametrize("weights", [list, tuple])
def test_a_list_of_one_weight_is_for_the_rows(weights: type) -> None:
    def fit(runner: Any) -> Any:
        y, weight = array(20, ROWS, 3), weights([np.abs(array(30, ROWS))])
        options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        return runner.fit(array(10, ROWS, 4), y, sample_weight=weight, **options).history

    def one_output() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), dense(0, 3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_close(fit(mirrored(one_output)), fit(one_output()))
