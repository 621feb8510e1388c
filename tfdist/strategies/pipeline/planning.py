"""Plans the stages of models as the user asked for them: options, memory of calls, and tables."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.errors import ConfigurationError
from tfdist.strategies.pipeline.schedule import device_of, micro_batches_in_memory, planned_speed_up
from tfdist.strategies.pipeline.stages import (
    Stages,
    calls_of_model,
    check_no_custom_step,
    into_stages,
)
from tfdist.strategies.sharded.plan import num_bytes, state_of
from tfdist.upstream.keras_layers import operations_called_through
from tfdist.upstream.keras_optimizers import unwrapped
from tfdist.upstream.tensorflow_graphs import kept_bytes


@dataclasses.dataclass
class StagePlanner:
    """Splits models into stages, each model once.

    Attributes:
        num_devices: The number of devices.
        num_stages: The number of stages, a multiple of the number of devices.
        micro_batches: As for `Pipeline`.
        order: As for `Pipeline`.
        cut_at: Names of layers, as for `Pipeline`.
        balance: As for `Pipeline`.
        balance_rows: As for `Pipeline`.
    """

    num_devices: int
    num_stages: int
    micro_batches: int
    order: str
    cut_at: Sequence[str]
    balance: str
    balance_rows: int

    def __post_init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[keras.Model, Stages] = weakref.WeakKeyDictionary()

    def stages_of(self, model: keras.Model) -> Stages:
        """Returns the stages of a model, the same ones while it has the same layers.

        Raises:
            UnsupportedModelError: The model cannot be split this way.
            ConfigurationError: No layer has a given name, or the shape of an input is unknown.
        """
        check_no_custom_step(model)
        operations = calls_of_model(model)
        before = self._known.get(model)
        if before is not None and [*map(id, before.operations)] == [*map(id, operations)]:
            return before
        costs = None  # the number of parameters
        if self.balance != "parameters":
            held = _held_bytes_by_call(model, operations, self.balance_rows)
            in_memory = micro_batches_in_memory(
                self.num_stages, self.micro_batches, self.order, self.num_devices
            )
            costs = [[call.weights + num * call.activations for call in held] for num in in_memory]
        stages = into_stages(model, self.num_stages, self.cut_at, costs)
        self._known[model] = stages
        return stages


# ---- options ----


def layer_names(cut_at: str | Sequence[str] | None) -> list[str]:
    """Returns the names of layers in a comma-separated string, or in a sequence."""
    names = cut_at.split(",") if isinstance(cut_at, str) else list(cut_at or ())
    return [name.strip() for name in names]


def requested_stages(stages: int | None, cut_at: Sequence[str]) -> int | None:
    """Returns the number of stages that the options ask for, if they do.

    Raises:
        ConfigurationError: A number is invalid, or the options contradict each other.
    """
    if stages is not None:
        check_at_least(2, stages=stages)
    if cut_at and stages not in (None, len(cut_at) + 1):
        raise ConfigurationError(
            f"cut_at={','.join(cut_at)} makes {len(cut_at) + 1} stages, but stages={stages}: leave "
            "stages out."
        )
    return len(cut_at) + 1 if cut_at else stages


def stages_on(num_devices: int, stages: int | None, micro_batches: int, order: str) -> int:
    """Returns the number of stages on a number of devices.

    Raises:
        ConfigurationError: The numbers do not match.
    """
    if order != "interleaved":
        if stages not in (None, num_devices):
            raise ConfigurationError(
                f"strategy 'pipeline' needs one device per stage, but got stages={stages} on "
                f"{num_devices} devices. Use as many devices as stages, omit one of the two, or "
                "use order='interleaved'."
            )
        return num_devices
    num_stages = 2 * num_devices if stages is None else stages
    if num_stages % num_devices or num_stages == num_devices:
        raise ConfigurationError(
            f"order='interleaved' needs several stages per device, but got stages={stages} on "
            f"{num_devices} devices. Use {2 * num_devices} stages, or another multiple."
        )
    if micro_batches % num_devices:
        raise ConfigurationError(
            f"order='interleaved' needs a multiple of {num_devices} micro-batches on {num_devices} "
            f"devices, but got micro_batches={micro_batches}."
        )
    return num_stages


def check_at_least(least: int, **numbers: object) -> None:
    """Checks numbers, given by name.

    Raises:
        ConfigurationError: One is not an int, or smaller than `least`.
    """
    for name, value in numbers.items():
        if not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}={value!r}: expected a number from {least}.")


# ---- memory ----


class _HeldBytes(NamedTuple):
    """What a call holds in memory, in bytes.

    Attributes:
        weights: Its weights, their optimizer state, the sum of their gradients, and the gradients
            of one micro-batch.
        activations: What the forward pass of one micro-batch keeps for the backward pass.
    """

    weights: float
    activations: float


def _held_bytes_by_call(
    model: keras.Model, operations: Sequence[keras.Operation], num_rows: int
) -> list[_HeldBytes]:
    """Estimates what each call holds in memory, in the order of a forward pass.

    The estimate comes from a traced graph (`kept_bytes`); nothing is computed.

    Args:
        model: A built model, which is left unchanged.
        operations: The operation of each call.
        num_rows: Rows of a micro-batch.

    Raises:
        ConfigurationError: The shape of an input is not fully known.
    """
    called = {id(operation) for operation in operations}
    optimizer = getattr(model, "optimizer", None)
    plain = unwrapped(optimizer)
    state = (state_of(plain) or 0.0) if plain is not None else 0.0
    inside, counted, held = [False], set[int](), list[_HeldBytes]()

    def noted(call: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or id(operation) not in called:
            return call(operation, *args, **kwargs)
        inside[0] = True
        try:
            outputs, activations = _trace_activations(call, operation, args, kwargs)
        finally:
            inside[0] = False
        variables = [v for v in getattr(operation, "variables", []) if v.dtype != "string"]
        weights = sum(
            num_bytes(v) * (3.0 + state if v.trainable else 1.0)
            for v in variables
            if id(v) not in counted
        )
        counted.update(map(id, variables))
        held.append(_HeldBytes(weights, activations))
        return outputs

    def forward() -> None:
        inputs = [_random_rows(spec, num_rows) for spec in model.inputs]
        with keras.StatelessScope(), operations_called_through(noted):
            model(inputs if len(inputs) > 1 else inputs[0], training=True)

    tf.function(forward, autograph=False).get_concrete_function()
    return held


def _trace_activations(
    call: Callable[..., Any], operation: Any, args: Any, kwargs: Any
) -> tuple[Any, float]:
    """Traces a call and its backward pass; returns its output and the bytes kept in between."""
    graph = tf.compat.v1.get_default_graph()
    entering = [t for t in keras.tree.flatten((args, kwargs)) if _has_gradient(t)]
    begin = len(graph.get_operations())
    outputs = call(operation, *args, **kwargs)
    end = len(graph.get_operations())
    differentiable = [t for t in keras.tree.flatten(outputs) if _has_gradient(t)]
    weights = [v.value for v in getattr(operation, "trainable_variables", [])]
    if differentiable and (entering or weights):
        total = [tf.reduce_sum(tensor) for tensor in differentiable]
        tf.gradients(total, [*entering, *weights], stop_gradients=entering)
    traced = graph.get_operations()
    return outputs, kept_bytes(traced[begin:end], traced[end:], differentiable)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _random_rows(spec: keras.KerasTensor, num_rows: int) -> tf.Tensor:
    """Returns rows for a model's input: random floats, integer zeros, or empty strings."""
    shape = [num_rows, *spec.shape[1:]]
    if None in shape:
        raise ConfigurationError(
            "balance='memory' measures layers on inputs of the model's shapes, but "
            f"{spec.name!r} is {tuple(spec.shape)}: give its Input all sizes, or use "
            "balance='parameters'."
        )
    if spec.dtype == "string":
        return tf.fill(shape, "")
    values = keras.random.normal(shape, seed=0) if "float" in spec.dtype else tf.zeros(shape)
    return tf.cast(values, spec.dtype)


# ---- tables ----


def describe(
    stages: Stages | None,
    devices: Sequence[str],
    num_stages: int,
    num_micro_batches: int,
    order: str,
) -> dict[str, str]:
    """Returns the rows of the start-up table about stages, micro-batches and bubble."""
    in_memory = micro_batches_in_memory(num_stages, num_micro_batches, order, len(devices))
    most_text = num_micro_batches if len(set(in_memory)) == 1 else ", ".join(map(str, in_memory))
    shares = [1 / num_stages] * num_stages
    best = planned_speed_up(shares, num_micro_batches, order, len(devices))
    return {
        "shard policy": "each global batch is split into micro-batches",
        **_describe_stages(stages, devices, num_stages),
        "micro-batches": f"{num_micro_batches}, {order}; a stage keeps {most_text}",
        "bubble": f"{1 - best / len(devices):.0%} of the devices' time if stages cost the same: "
        f"at most {best:.2f} times the speed of one device, of {len(devices)}",
    }


def _describe_stages(
    stages: Stages | None, devices: Sequence[str], num_stages: int
) -> dict[str, str]:
    if stages is None:
        return {"stages": f"{num_stages}, split when the shapes of the data are known"}
    sizes = stages.num_parameters()
    total, cost_texts = max(sum(sizes), 1), [""] * len(sizes)
    if (held := stages.num_bytes()) is not None:
        cost_texts = [f", {num_bytes / 1e6:,.1f} MB" for num_bytes in held]
    rows = {
        f"stage {number}": (
            f"{first} .. {last}: {size:,} parameters ({size / total:.0%}){cost}, "
            f"on {connection.short(devices[device_of(number, len(devices))])}"
        )
        for number, ((first, last), size, cost) in enumerate(
            zip(stages.ends(), sizes, cost_texts, strict=True)
        )
    }
    if shared := stages.shared_weights():
        (path, readers), *more = shared.items()
        text = f"{path}: stages {', '.join(map(str, readers))}"
        rows["shared weights"] = text + (f", and {len(more)} more" if more else "")
    return rows
