"""What each device is to keep of a model's state, before anything is moved."""

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
        cut: Weights of which each device keeps a part.
        homes: The others, each with the device that keeps its state whole.
        why_whole: Why none is cut; None: some may be.
    """

    cut: list[keras.Variable]
    homes: list[tuple[keras.Variable, str]]
    why_whole: str | None

    def describe(self, num_devices: int) -> str:
        """Returns which share of the parameters is cut, in words."""
        num_cut = sum(weight.shape.num_elements() for weight in self.cut)
        total = num_cut + sum(weight.shape.num_elements() for weight, _ in self.homes)
        share = f"{num_cut / max(total, 1):.1%} of {total:,} parameters cut in {num_devices}"
        if self.homes:
            share += ", the rest whole, each on one device"
        return share + (f" ({self.why_whole})" if self.why_whole else "")

    def bytes_by_device(
        self, devices: Sequence[str], state: float, copies_weights: bool
    ) -> dict[str, int]:
        """Returns the bytes of weights and optimizer state that each device will hold.

        Where each device has a whole copy of the weights to read from, the part that the optimizer
        changes is held besides it, as ZeRO's master weights are.

        Args:
            devices: All of them.
            state: Numbers that the optimizer keeps about each parameter.
            copies_weights: Whether each device has the weights whole.
        """
        held = dict.fromkeys(devices, 0.0)
        for weight in self.cut:
            size = tf.as_dtype(weight.dtype).size
            for device, own in zip(
                devices, sizes(weight.shape.num_elements(), len(devices)), strict=True
            ):
                held[device] += size * own * (1 + state)
        for weight, home in self.homes:
            held[home] += num_bytes(weight) * (state if copies_weights else 1 + state)
        if copies_weights:
            whole = sum(map(num_bytes, self.cut)) + sum(num_bytes(w) for w, _ in self.homes)
            held = {device: own + whole for device, own in held.items()}
        return {device: round(own) for device, own in held.items()}


def plan(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    devices: Sequence[str],
    smallest: int,
) -> Plan:
    """Returns what becomes of each trainable weight; the same whenever it is asked.

    Args:
        model: Built.
        optimizers: Its own, without the `LossScaleOptimizer` around one.
        devices: That share the state.
        smallest: Elements from which on a weight is cut.
    """
    why_whole = elementwise.why_whole(model, optimizers)
    tables = elementwise.tables(model)
    load, cut, homes = dict.fromkeys(devices, 0), [], []
    for weight in sorted(model.trainable_variables, key=num_bytes, reverse=True):
        is_table = why_whole is not None or id(weight) in tables
        if not is_table and elementwise.can_be_cut(weight, smallest):
            cut.append(weight)
            continue
        home = min(devices, key=load.__getitem__)
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
