"""The parts of a first batch, each computed by a user's step, to compare them with the whole.

To compare like with like, the parts go on with the gradients and the results of metrics that the
whole has: then all of them find the same weights in a second loss, and in an update of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.precision import Scaling
from tfdist.step.own.logs import flat_logs
from tfdist.step.own.recorded import Recorded, Replayed
from tfdist.step.own.scope import OwnScope
from tfdist.step.own.trial import StepFn, shaken, tried
from tfdist.strategies import row_counts, shares
from tfdist.upstream import keras_model

#: Rows to ask at most, where the step takes less than a batch.
MAX_ROWS = 64


class UnequalPartsError(Exception):
    """Raised where the parts of a batch do not make the whole; says what does not."""


@dataclass
class Part:
    """What came of some rows: gradients, indices and changes as NumPy arrays, and the logs.

    Attributes:
        num_rows: How many.
        run: What was asked on the way.
        gradients: Those of variables, in the order in which the step takes them.
        indices: Of those gradients that are slices, by their places.
        changes: By the variables' ids.
        logs: By name, as the step returned them.
        scope: In which it ran.
    """

    num_rows: int
    run: Recorded
    gradients: list[list[Any]]
    indices: list[dict[int, np.ndarray]]
    changes: dict[int, np.ndarray]
    logs: dict[str, Any]
    scope: OwnScope


@dataclass(frozen=True)
class Parts:
    """A step of a model, and its first batch.

    Args:
        model: Built.
        known: All variables that its step may change.
        step: Its `train_step` or `test_step`.
        scalings: Of its optimizers that scale their loss, by id.
        batch: The first global one.
    """

    model: keras.Model
    known: Sequence[keras.Variable]
    step: StepFn
    scalings: dict[int, Scaling]
    batch: Any

    def whole(self) -> Part:
        """Returns what comes of a number of rows that the step takes."""
        rows = int(row_counts.num_rows(self.batch))
        try:
            return self._part(0, min(rows, MAX_ROWS), Recorded(), 1.0)
        except TfdistError:
            raise
        except Exception:
            if rows <= MAX_ROWS:
                raise
            return self._part(0, rows, Recorded(), 1.0)  # the number may be written into it

    def of(self, whole: Part) -> list[Part]:
        """Returns the first and the second part of a whole.

        Raises:
            UnequalPartsError: The step cannot be asked.
        """
        rows = whole.num_rows
        if whole.run.inner:
            raise UnequalPartsError("its loss is made of gradients of weights")
        if rows < 2:
            raise UnequalPartsError("the first batch has one row, which does not tell")
        if found := row_counts.uneven(self.batch):
            raise UnequalPartsError(found)
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(self.batch)):
            raise UnequalPartsError("its input is sparse")
        try:
            return [
                self._part(*bounds, Replayed(whole.run), 0.0)
                for bounds in ((0, rows // 2), (rows // 2, rows))
            ]
        except TfdistError:
            raise
        except Exception as error:
            cause = str(error).strip().splitlines() or [type(error).__name__]
            raise UnequalPartsError(f"it fails on a part of the batch ({cause[0]})") from error

    def _part(self, begin: int, end: int, run: Recorded, start: float) -> Part:
        """Runs the step on some rows, from metrics of a value."""
        metrics = {id(v) for m in keras_model.metrics_of(self.model) for v in m.variables}
        values = shaken(self.model, self.known, metrics, start)
        rows = shares.take(self.batch, begin, end)
        scope, logs = tried(self.model, self.step, rows, run, self.scalings, values)
        before = {id(v): array(value) for v, value in values}
        changes = {
            key: array(scope.state_mapping[key]) - before[key]
            for key in scope.assigned
            if key in before
        }
        gradients = [[None if g is None else array(g) for g in each] for each in run.taken]
        indices = [
            {i: g.indices.numpy() for i, g in enumerate(each) if isinstance(g, tf.IndexedSlices)}
            for each in run.taken
        ]
        return Part(end - begin, run, gradients, indices, changes, flat_logs(logs), scope)


def array(tensor: Any) -> np.ndarray:
    """Returns a tensor, or slices, as numbers that can be subtracted."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype.is_floating:
        tensor = tf.cast(tensor, tf.float64)
    elif tensor.dtype.is_bool or tensor.dtype.is_unsigned:
        tensor = tf.cast(tensor, tf.int64)
    return tensor.numpy()
