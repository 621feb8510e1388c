"""Overrides of every public member of Keras's base classes, compared with plain Keras."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.extension_points.table import BASES, PAGE, TABLE, members, page
from tests.support import ROOT
from tfdist import devices
from tfdist.errors import UnsupportedModelError
from tfdist.trainer import Trainer

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(10, 4)), RNG.normal(size=(10, 1))


class Batches(keras.utils.PyDataset):
    """Two batches of 5 rows, which two replicas split unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = X.copy(), Y.copy()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(5 * index, 5 * index + 5)
        return self.x[rows], self.y[rows]


#: What the program creates of each class; tests create a subclass of it instead.
PARTS: dict[str, tuple[type, dict[str, Any]]] = {
    "model": (keras.Model, {}),
    "layer": (layers.Dense, {"units": 1, "name": "head"}),
    "optimizer": (keras.optimizers.SGD, {"momentum": 0.5}),
    "metric": (keras.metrics.MeanAbsoluteError, {"name": "mae"}),
    "loss": (keras.losses.MeanSquaredError, {}),
    "callback": (keras.callbacks.Callback, {}),
    "dataset": (Batches, {}),
    "initializer": (keras.initializers.RandomNormal, {"seed": 3}),
    "regularizer": (keras.regularizers.L2, {"l2": 0.01}),
    "constraint": (keras.constraints.UnitNorm, {}),
    "schedule": (
        keras.optimizers.schedules.ExponentialDecay,
        {"initial_learning_rate": 0.1, "decay_steps": 2, "decay_rate": 0.9},
    ),
    "policy": (keras.DTypePolicy, {"name": "float64"}),
}


class Program:
    """A small program of all parts.

    Args:
        part: The part that is of a subclass of Keras's class.
        overrides: Members of the subclass.
        attributes: Members to set on the object.
    """

    def __init__(self, part: str = "", overrides: Any = None, attributes: Any = None) -> None:
        self._part, self._overrides, self._attributes = part, overrides or {}, attributes or {}

    def make(self, part: str, *args: Any, **options: Any) -> Any:
        kind, defaults = PARTS[part]
        if part != self._part:
            return kind(*args, **defaults | options)
        members = {n: _method(kind, n, override) for n, override in self._overrides.items()}
        made = type(f"Own{kind.__name__}", (kind,), members)(*args, **defaults | options)
        for name, override in self._attributes.items():
            setattr(made, name, _attribute(made, name, override))
        return made

    def build(self) -> keras.Model:
        keras.utils.set_random_seed(1)
        policy = self.make("policy")
        inputs = keras.Input((4,), dtype="float64")
        hidden = layers.Dense(
            5, "tanh", dtype=policy, name="body",
            kernel_initializer=self.make("initializer"),
            kernel_regularizer=self.make("regularizer"),
            bias_constraint=self.make("constraint"),
            bias_initializer="ones",
        )(inputs)  # fmt: skip
        head = self.make("layer", dtype="float64")
        model = self.make("model", inputs=inputs, outputs=head(hidden))
        optimizer = self.make("optimizer", learning_rate=self.make("schedule"))
        model.compile(optimizer, loss=self.make("loss"), metrics=[self.make("metric")])
        return model

    def results(self, strategy: str | None) -> dict[str, Any]:
        """Returns everything that the program computes; None: with plain Keras."""
        source = self.build() if strategy is None else Trainer(
            self.build, strategy, devices=2 if strategy == "mirrored" else None
        )  # fmt: skip
        model = source if isinstance(source, keras.Model) else source.model
        callbacks = [self.make("callback")]
        history = source.fit(
            self.make("dataset"), epochs=2, shuffle=False, verbose=0, callbacks=callbacks,
            validation_data=(X[:5], Y[:5]), validation_batch_size=5,
        )  # fmt: skip
        evaluated = source.evaluate(
            X, Y, batch_size=5, verbose=0, callbacks=callbacks, return_dict=True
        )
        predicted = source.predict(X, batch_size=5, verbose=0, callbacks=callbacks)
        logs = {f"epochs of {k}": v for k, v in history.history.items()}
        weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
        return logs | evaluated | weights | {"predictions": predicted}


def _method(kind: type, name: str, override: Any) -> Any:
    """Returns a method of a subclass of a class, in the signature of the one that it overrides."""
    if not isinstance(override, types.FunctionType):
        return override

    @functools.wraps(getattr(kind, name))
    def method(self: Any, *args: Any, **options: Any) -> Any:
        owner = next(base for base in type(self).__mro__ if method in vars(base).values())
        return override(getattr(super(owner, self), name), self, *args, **options)

    return method


def _attribute(owner: Any, name: str, override: Any) -> Any:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def function(*args: Any, **options: Any) -> Any:
        return override(plain, owner, *args, **options)

    return function


def equal(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> bool:
    return one.keys() == other.keys() and all(
        np.allclose(one[key], other[key], tolerance, tolerance) for key in one
    )


CASES = [
    (part, name, form)
    for part, points in TABLE.items()
    for name, point in points.items()
    if point.override is not None
    for form in ("class", "object")
    if form == "class" or (point.as_attribute and not isinstance(point.override, property))
]

#: Cases of `make test`, under `mirrored`.
GATE = {
    ("optimizer", "apply_gradients", "class"), ("optimizer", "learning_rate", "class"),
    ("metric", "result", "class"), ("model", "compute_metrics", "class"),
    ("model", "train_step", "object"), ("model", "make_train_function", "class"),
    ("model", "losses", "class"), ("model", "make_predict_function", "class"),
    ("model", "variables", "class"),
}  # fmt: skip


@functools.cache
def reference() -> dict[str, Any]:
    return Program().results(None)


@pytest.fixture(autouse=True)
def _float64() -> Any:
    devices.configure(2)
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(
            case,
            strategy,
            id="-".join([*case, strategy]),
            marks=[] if case in GATE and strategy == "mirrored" else [pytest.mark.long],
        )
        for case in CASES
        for strategy in ("one_device", "mirrored")
    ],
)
def test_override_has_the_results_of_plain_keras(case: tuple[str, str, str], strategy: str) -> None:
    part, name, form = case
    point = TABLE[part][name]
    of_class = dict(point.also) | ({name: point.override} if form == "class" else {})
    program = Program(part, of_class, {name: point.override} if form == "object" else {})
    if point.refused:
        with pytest.raises(UnsupportedModelError, match=point.refused):
            program.results(strategy)
        return
    expected = program.results(None)
    assert equal(expected, reference(), 1e-12) != point.changes
    tolerance = 1e-5 if "dtype" in name else 1e-9
    results = program.results(strategy)
    assert results.keys() == expected.keys()
    different = [k for k, v in expected.items() if not np.allclose(v, results[k], tolerance)]
    assert not different, {k: (expected[k], results[k]) for k in different}


@pytest.mark.parametrize("part", BASES)
def test_every_public_member_has_a_row(part: str) -> None:
    assert sorted(TABLE[part]) == members(BASES[part])


def test_page_shows_the_table() -> None:
    assert Path(ROOT, PAGE).read_text("utf-8") == page()
    assert "|  |" not in page()
