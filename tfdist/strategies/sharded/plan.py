"""What each device or process is to keep of a model's state, before anything is moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.strategies.sharded import elementwise
from tfdist.strategies.sharded.division import sizes

#: What is divided, for people.
WHAT = {
    "optimizer": "optimizer state (ZeRO 1)",
    "gradients": "optimizer state and gradients (ZeRO 2)",
    "parameters": "optimizer state, gradients and weights (ZeRO 3)",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Whose state goes where.

    Attributes:
        cut: Weights of which each owner keeps a part.
        homes: The others, each with the owner that has least so far, for its state.
        why_whole: Why none is cut; None: some may be.
    """

    cut: list[keras.Variable]
    homes: list[tuple[keras.Variable, str]]
    why_whole: str | None

    def describe(self, num_owners: int, rest_is: str) -> str:
        """Returns which share of the parameters is cut, in words, and where the rest is."""
        num_cut = sum(weight.shape.num_elements() for weight in self.cut)
        total = num_cut + sum(weight.shape.num_elements() for weight, _ in self.homes)
        share = f"{num_cut / max(total, 1):.1%} of {total:,} parameters cut in {num_owners}"
        if self.homes:
            share += f", the rest whole, {rest_is}"
        return share + (f" ({self.why_whole})" if self.why_whole else "")

    def bytes_by_owner(
        self, owners: Sequence[str], state: float, copies_weights: bool, is_rest_copied: bool
    ) -> dict[str, int]:
        """Returns the bytes of weights and optimizer state that each owner will hold.

        Where each owner has a whole copy of the weights to read from, the part that the optimizer
        changes is held besides it, as ZeRO's master weights are.

        Args:
            owners: All of them: devices, or processes.
            state: Numbers that the optimizer keeps about each parameter.
            copies_weights: Whether each has the weights whole.
            is_rest_copied: Whether each has all state of what is not cut.
        """
        held = dict.fromkeys(owners, 0.0)
        for weight in self.cut:
            size = tf.as_dtype(weight.dtype).size
            for owner, own in zip(
                owners, sizes(weight.shape.num_elements(), len(owners)), strict=True
            ):
                held[owner] += size * own * (1 + state)
        for weight, home in self.homes:
            for owner in owners if is_rest_copied else [home]:
                held[owner] += num_bytes(weight) * (state if copies_weights else 1 + state)
        if copies_weights:
            whole = sum(map(num_bytes, self.cut)) + sum(num_bytes(w) for w, _ in self.homes)
            held = {owner: own + whole for owner, own in held.items()}
        return {owner: round(own) for owner, own in held.items()}


def plan(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    owners: Sequence[str],
    smallest: int,
) -> Plan:
    """Returns what becomes of each trainable weight; the same whenever it is asked.

    Args:
        model: Built.
        optimizers: Its own, without the `LossScaleOptimizer` around one.
        owners: That share the state.
        smallest: Elements from which on a weight is cut.
    """
    why_whole = elementwise.why_whole(model, optimizers)
    tables = elementwise.tables(model)
    load, cut, homes = dict.fromkeys(owners, 0), [], []
    for weight in sorted(model.trainable_variables, key=num_bytes, reverse=True):
        is_table = why_whole is not None or id(weight) in tables
        if not is_table and elementwise.can_be_cut(weight, smallest):
            cut.append(weight)
            continue
        home = min(owners, key=load.__getitem__)
        load[home] += num_bytes(weight)
        homes.append((weight, home))
    return Plan(cut, homes, why_whole)


def num_bytes(variable: keras.Variable) -> int:
    """Returns the bytes of all elements of a variable."""
    return variable.shape.num_elements() * tf.as_dtype(variable.dtype).size


def state_of(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Returns how many numbers an optimizer keeps about each parameter: those of a small matrix.

    None where it cannot be told before it is built: its configuration makes no second one.
    """
    try:
        twin = type(optimizer).from_config(optimizer.get_config())
        with tf.device("CPU:0"):
            weight = keras.Variable(tf.zeros([64, 64]))
            twin.build([weight])
    except Exception:  # an optimizer of the user's may raise anything
        return None
    others = sum(v.shape.num_elements() for v in twin.variables if v.shape.rank)
    return others / weight.shape.num_elements()
