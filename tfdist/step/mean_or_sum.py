"""How a value that user code computes from a share adds up over the shares.

A layer's `add_loss`, an activity regulariser and a state that a layer updates are single numbers
or tensors: nothing tells from outside whether they are a mean over the rows or a sum. So they are
asked once, on the first batch: computed for each half of it and for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step.aggregation import Aggregation, closest, rounding
from tfdist.step.lookups import Lookups
from tfdist.step.probes import (
    CompiledLoss,
    Probe,
    compiled_losses,
    halves,
    has_own_metrics,
    is_row_by_row,
    metric_changes,
)
from tfdist.strategies import shares
from tfdist.strategies.row_counts import num_rows
from tfdist.upstream import keras_losses, keras_model

#: How far a probe of random layers may be off: other rows, other draws.
_RANDOM = 0.2


class Aggregations:
    """Answers, for one model, how its added losses and updated states add up.

    Args:
        model: Built.
        first_batch: Returns the first global batch; called outside of any graph, and only for a
            model with something to ask about.

    Attributes:
        lookups: Answers likewise for the gradients of tables.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, first_batch
        self.lookups = Lookups(model, first_batch)
        self._probes: dict[bool, list[Probe]] = {}
        self._compiled: list[CompiledLoss] = []
        self._whole_metrics: frozenset[int] | None = None

    def of_losses(self, num_losses: int, training: bool) -> list[Aggregation]:
        """Returns how each added loss adds up, in the order in which the layers add them.

        Raises:
            UnsupportedModelError: One is neither a mean nor a sum over rows.
        """
        # Without random layers the probe is exact; what only training adds is probed there.
        for mode in (False, training):
            probes = self._run(mode)
            drawn = mode and keras_model.seeds_of(self._model)
            tolerance = _RANDOM if drawn else rounding(self._model)
            if len(probes[0].losses) == num_losses:
                values = zip(*(p.losses for p in probes), strict=True)
                return [
                    _compared(f"add_loss number {i}", v, tolerance) for i, v in enumerate(values)
                ]
        raise UnsupportedModelError(
            f"The layers add {num_losses} losses in training, but {len(probes[0].losses)} when "
            "called again: a loss that comes and goes cannot be split; use one device."
        )

    def of_state(self, variable: keras.Variable) -> Aggregation:
        """Returns how what the forward pass adds to a variable adds up.

        Raises:
            UnsupportedModelError: It is neither a mean nor a sum over rows.
        """
        probes = self._run(True)
        if id(variable) not in probes[0].states:
            raise UnsupportedModelError(
                f"The update of {variable.path!r} is not the model's call's, so it is not known "
                "how those of shares add up: make it in call, or use one device."
            )
        changes = [p.states[id(variable)] for p in probes]
        tolerance = _RANDOM if keras_model.seeds_of(self._model) else rounding(self._model)
        what = f"The update of {variable.path!r}"
        return _compared(what, changes, tolerance, probes[0].lost[id(variable)])

    def whole_metrics(self) -> frozenset[int]:
        """Returns the ids of the metrics' variables, if they have to see whole batches.

        It returns none where what each batch adds to them is a sum over its rows, which holds for
        Keras's own.
        """
        if self._whole_metrics is None:
            own = has_own_metrics(self._model)
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
                metric_changes(self._model, shares.take(rows, *part)) for part in halves(x)
            )
        added = {key: first.get(key, 0) + second.get(key, 0) for key in both}
        rtol = rounding(self._model)
        close = (np.allclose(added[key], value, rtol) for key, value in both.items())
        return set() if all(close) else set(both)

    def has_independent_rows(self, number: int) -> bool:
        """Tells whether a compiled loss gives each row a value that no other row moves.

        Args:
            number: Its place among the losses of the model.
        """
        compile_loss = keras_losses.compile_loss(self._model)
        if is_row_by_row(keras_losses.compiled_losses(compile_loss)[number]):
            return True
        with tf.init_scope():
            if not self._compiled:
                self._compiled = compiled_losses(self._model, self._first_batch())
            loss, y_true, y_pred = self._compiled[number]
            half = (int(num_rows(y_pred)) + 1) // 2
            some = loss.call(shares.take(y_true, 0, half), shares.take(y_pred, 0, half))
            rtol = rounding(self._model)
            return np.allclose(some, loss.call(y_true, y_pred)[:half], rtol, atol=1e-6)

    def _run(self, training: bool) -> list[Probe]:
        """Probes the first half of the rows, the second, and both."""
        if training not in self._probes:
            with tf.init_scope():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                self._probes[training] = [
                    Probe(self._model, shares.take(x, *part), training) for part in halves(x)
                ]
        return self._probes[training]


def _compared(
    what: str, values: Sequence[Any], tolerance: float, slack: float = 0.0
) -> Aggregation:
    """Compares the value for the first and second half together with their sum and their mean."""
    which, error, size = closest(values, (0.5, 0.5))
    if size == 0:
        raise UnsupportedModelError(
            f"{what} is zero on the first batch, which does not tell whether it is a mean or a "
            "sum over rows: start from data or weights where it is not."
        )
    if error <= tolerance * size + slack:
        return which
    raise UnsupportedModelError(
        f"{what} is neither a mean nor a sum over rows, so replicas cannot compute it on their "
        "shares: override compute_loss, which sees the whole batch, or use one device."
    )
