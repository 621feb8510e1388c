"""How a value that user code computes from a share adds up over the shares.

A layer's `add_loss`, an activity regulariser and a state that a layer updates are single numbers
or tensors: nothing tells from outside whether they are a mean over the rows or a sum. So they are
asked once, on the first batch: computed for each half of it and for the whole.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.strategies import shares

#: Rows of the probe at most: enough for a random layer's mean, few enough to be quick.
MAX_ROWS = 64

#: How far a probe may be off, relative to what it compares.
_EXACT, _RANDOM = 1e-3, 0.2


class Kind(enum.Enum):
    """How values of shares make the value of the batch."""

    MEAN = "mean"  # weighted by rows; what does not depend on the rows at all is one of these
    SUM = "sum"


class Kinds:
    """Answers, for one model, how its added losses and updated states add up.

    Args:
        model: Built.
        first_batch: Returns the first global batch; called outside of any graph, and only for a
            model with something to ask about.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, first_batch
        self._probes: dict[bool, list[_Probe]] = {}
        self._compiled: list[_CompiledLoss] = []
        self._whole_metrics: frozenset[int] | None = None

    def of_losses(self, num_losses: int, training: bool) -> list[Kind]:
        """Returns the kind of each added loss, in the order in which the layers add them.

        Raises:
            UnsupportedModelError: One is neither a mean nor a sum over rows.
        """
        # Without random layers the probe is exact; what only training adds is probed there.
        for mode in (False, training):
            probes, tolerance = self._run(mode), self._tolerance if mode else _EXACT
            if len(probes[0].losses) == num_losses:
                halves = zip(*(p.losses for p in probes), strict=True)
                return [_kind(f"add_loss number {i}", v, tolerance) for i, v in enumerate(halves)]
        raise UnsupportedModelError(
            f"The layers add {num_losses} losses in training, but {len(probes[0].losses)} when "
            "called again: a loss that comes and goes cannot be split; use one device."
        )

    def of_state(self, variable: keras.Variable) -> Kind:
        """Returns the kind of what the forward pass adds to a variable.

        Raises:
            UnsupportedModelError: It is neither a mean nor a sum over rows.
        """
        changes = [p.states[id(variable)] for p in self._run(True)]
        return _kind(f"The update of {variable.path!r}", changes, self._tolerance)

    @property
    def _tolerance(self) -> float:
        """Relative; random layers draw other numbers for other rows."""
        layers = self._model._flatten_layers()
        return _RANDOM if any(getattr(x, "_seed_generators", []) for x in layers) else _EXACT

    def whole_metrics(self) -> frozenset[int]:
        """Returns the ids of the metrics' variables, if they have to see whole batches.

        It returns none where what each batch adds to them is a sum over its rows, which holds for
        Keras's own.
        """
        if self._whole_metrics is None:
            own = _has_own_metrics(self._model)
            self._whole_metrics = frozenset(self._run_metrics() if own else ())
        return self._whole_metrics

    def _run_metrics(self) -> set[int]:
        """Updates the metrics with the first half of the rows, the second, and both."""
        with tf.init_scope():
            x, y, weight = keras.utils.unpack_x_y_sample_weight(self._first_batch())
            with keras.StatelessScope():
                y_pred = self._model(x, training=False)
            rows = (x, y, y_pred, weight)
            first, second, both = (
                _metric_changes(self._model, shares.take(rows, *part)) for part in _halves(x)
            )
        added = {key: first.get(key, 0) + second.get(key, 0) for key in both}
        close = (np.allclose(added[key], value, rtol=_EXACT) for key, value in both.items())
        return set() if all(close) else set(both)

    def has_independent_rows(self, number: int) -> bool:
        """Tells whether a compiled loss gives each row a value that no other row moves.

        Args:
            number: Its place among the losses of the model.
        """
        entry = self._model._compile_loss._flat_losses[number]
        if _is_row_by_row(entry.loss):
            return True
        with tf.init_scope():
            if not self._compiled:
                self._compiled = _compiled_losses(self._model, self._first_batch())
            loss, y_true, y_pred = self._compiled[number]
            half = (int(shares.num_rows(y_pred)) + 1) // 2
            some = loss.call(shares.take(y_true, 0, half), shares.take(y_pred, 0, half))
            return np.allclose(some, loss.call(y_true, y_pred)[:half], rtol=1e-3, atol=1e-6)

    def _run(self, training: bool) -> list[_Probe]:
        """Probes the first half of the rows, the second, and both."""
        if training not in self._probes:
            with tf.init_scope():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                self._probes[training] = [
                    _Probe(self._model, shares.take(x, *part), training) for part in _halves(x)
                ]
        return self._probes[training]


#: A compiled loss, with the labels and outputs of the first batch that go to it.
_CompiledLoss = tuple[keras.losses.Loss, Any, Any]


def _is_row_by_row(loss: keras.losses.Loss) -> bool:
    """Whether a loss is one of Keras's own, which treat each row by itself (but for Circle)."""
    function = getattr(loss, "fn", type(loss))  # what a LossFunctionWrapper wraps
    ours = function.__module__.startswith("keras.src.losses")
    return ours and function is not keras.losses.circle


def _has_own_metrics(model: keras.Model) -> bool:
    """Whether a metric, or how they are computed, is not Keras's own."""
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return True
    metrics = model._compile_metrics.metrics if model._compile_metrics is not None else []
    # A MeanMetricWrapper is as Keras's own as the function that it wraps.
    sources = [getattr(m, "_fn", type(m)) for m in metrics]
    return not all(s.__module__.startswith("keras.src.") for s in sources)


def _metric_changes(model: keras.Model, rows: Any) -> dict[int, Any]:
    """What a batch adds to the metrics' variables, by their ids."""
    states = model.metrics_variables
    start = [(v, tf.zeros(v.shape, v.dtype)) for v in states]
    x, y, y_pred, weight = rows
    with keras.StatelessScope(start) as scope:
        model.compute_metrics(x, y, y_pred, sample_weight=weight)
    ends = [(v, scope.get_current_value(v), zeros) for v, zeros in start]
    return {id(v): np.asarray(end, np.float64) for v, end, zeros in ends if end is not zeros}


def _halves(x: Any) -> list[tuple[int, int]]:
    """The rows of a probe: the first half, the second, and both."""
    half = min(int(shares.num_rows(x)), MAX_ROWS) // 2
    if half == 0:
        raise UnsupportedModelError(
            "A model with added losses, states or metrics of its own needs a first batch of 2 rows "
            "or more, on which to see how they add up."
        )
    return [(0, half), (half, 2 * half), (0, 2 * half)]


def view_with(compile_loss: Any, losses: Sequence[Callable[..., Any]]) -> Any:
    """Returns a view of Keras's `CompileLoss` that calls other functions as its losses."""
    view = object.__new__(type(compile_loss))  # copy.copy() would save and load it
    view.__dict__.update(compile_loss.__dict__)
    entries = zip(compile_loss._flat_losses, losses, strict=True)
    view._flat_losses = [entry._replace(loss=loss) for entry, loss in entries]
    return view


def _compiled_losses(model: keras.Model, batch: Any) -> list[_CompiledLoss]:
    """Finds which labels and outputs go to which of the compiled losses."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    found: list[_CompiledLoss] = []

    def recorder(loss: keras.losses.Loss) -> Callable[..., tf.Tensor]:
        def record(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            found.append((loss, tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)))
            return tf.zeros(())

        return record

    with keras.StatelessScope():  # trackers and states stay as they are
        y_pred = model(x, training=False)
        recorders = [recorder(entry.loss) for entry in model._compile_loss._flat_losses]
        view_with(model._compile_loss, recorders)(y, y_pred, sample_weight)
    return found


class _Probe:
    """What one forward pass adds as losses and changes in the states, as NumPy arrays."""

    def __init__(self, model: keras.Model, x: Any, training: bool) -> None:
        with keras.StatelessScope(collect_losses=True) as scope:
            model(x, training=training)
        self.losses = [np.sum(keras.ops.convert_to_numpy(loss)) for loss in scope.losses]
        self.states = {}
        for variable in model.variables:
            new = scope.get_current_value(variable)
            if new is not None:
                old = np.asarray(variable.value, np.float64)
                self.states[id(variable)] = np.asarray(new, np.float64) - old


def _kind(what: str, values: Sequence[Any], tolerance: float) -> Kind:
    """Compares the value for the first and second half together with their sum and their mean."""
    first, second, both = (np.asarray(v, np.float64) for v in values)
    size = np.abs(first).sum() + np.abs(second).sum()
    from_sum = np.abs(both - (first + second)).sum()
    from_mean = np.abs(both - (first + second) / 2).sum()
    if size == 0 and np.abs(both).sum() == 0:
        raise UnsupportedModelError(
            f"{what} is zero on the first batch, which does not tell whether it is a mean or a "
            "sum over rows: start from data or weights where it is not."
        )
    if min(from_sum, from_mean) <= tolerance * size:
        return Kind.SUM if from_sum < from_mean else Kind.MEAN
    raise UnsupportedModelError(
        f"{what} is neither a mean nor a sum over rows, so replicas cannot compute it on their "
        "shares: override compute_loss, which sees the whole batch, or use one device."
    )
