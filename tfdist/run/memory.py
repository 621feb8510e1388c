"""Warns if training will not fit into the memory of the host."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import psutil
import tensorflow as tf

from tfdist.config import TrainConfig
from tfdist.console import units
from tfdist.upstream import keras_layers
from tfdist.upstream.keras_model import flatten_layers

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

#: Variables of the optimizer for each weight.
_SLOTS = {"adam": 2, "lamb": 2, "sgd": 1, "lars": 1}
#: Rows of the traced forward pass. More than one, because an axis of size one is broadcast.
_FEW_ROWS = 2
_CGROUP = Path("/sys/fs/cgroup")


def shortage(config: TrainConfig, model: Any, strategy: Strategy, spec: Any) -> str:
    """Returns a warning if training needs more memory than available; empty if it may fit.

    The estimate is a lower bound: one copy of gradients and optimizer state, and the outputs of
    layers with weights, which the backward pass needs. On GPUs, only `--memory` tells how much
    there is.
    """
    on_gpus = any(name.upper().startswith("GPU") for name in strategy.devices)
    num_parts = strategy.num_replicas if on_gpus else max(1, strategy.group.size)
    rows = math.ceil(config.batch_size / (num_parts * config.accumulate))
    weights = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.trainable_variables)
    state = weights * (1 + _SLOTS.get(config.optimizer, 0))
    activations = 0 if config.remat != "none" else rows * _row_bytes(model, spec)
    room = _room(config, on_gpus)
    if room is None or state + activations <= room:
        return ""
    if state < room:
        num_rounds = config.accumulate * math.ceil(activations / (room - state))
        cure = f"Use a smaller --batch-size, --accumulate {num_rounds} or more, or --remat all"
    else:
        cure = "Use a smaller network, or --strategy sharded over more devices"
    return (
        f"Training needs at least {units.format_bytes(state + activations)} more memory "
        f"({units.format_bytes(state)} for gradients and optimizer state, "
        f"{units.format_bytes(activations)} for activations of {rows} rows), but "
        f"only {units.format_bytes(room)} are available, so it may be killed. {cure}; "
        "tfdist plan memory predicts what fits."
    )


def _room(config: TrainConfig, on_gpus: bool) -> int | None:
    limits = [] if config.memory == "grow" else [int(config.memory) * 2**20]
    if not on_gpus:
        limits += [psutil.virtual_memory().available, *_cgroup_limits()]
    return min(limits, default=None)


def _cgroup_limits() -> Iterator[int]:
    """Yields the number of bytes that the container of this process can still allocate."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
        except (OSError, ValueError):  # there is no container, or no limit
            continue


def _row_bytes(model: Any, spec: Any) -> int:
    """Returns the bytes of one row of the outputs of all layers with weights.

    The forward pass is traced, which also finds layers within layers and the lengths of sequences.
    A layer with activation checkpointing counts as a whole.
    """
    inputs = tf.nest.map_structure(_few_rows, keras.utils.unpack_x_y_sample_weight(spec)[0])
    variables = tf.nest.map_structure(
        lambda variable: tf.TensorSpec(variable.shape, variable.dtype),
        (model.trainable_variables, model.non_trainable_variables),
    )
    recomputed = [layer for layer in flatten_layers(model) if keras_layers.is_in_remat_scope(layer)]
    found: dict[int, int] = {}
    enclosing: list[Any] = []  # layers with activation checkpointing around the current call

    def measured(call: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = any(layer is other for other in recomputed)
        enclosing.extend([layer] * is_whole)
        outputs = call(layer, *args, **kwargs)
        del enclosing[len(enclosing) - is_whole :]
        is_leaf = isinstance(layer, keras.layers.Layer) and len(flatten_layers(layer)) == 1
        if not enclosing and (is_whole or (is_leaf and layer.weights)):
            size = sum(map(_num_bytes, tf.nest.flatten(outputs)))
            found[id(layer)] = max(size, found.get(id(layer), 0))
        return outputs

    @tf.function(autograph=False)
    def forward(weights: Any, x: Any) -> None:
        model.stateless_call(*weights, x, training=True)

    try:
        with contextlib.ExitStack() as stack:
            for layer in recomputed:
                stack.enter_context(keras_layers.remat_enabled(layer, does=False))
            stack.enter_context(keras_layers.operations_called_through(measured))
            forward.get_concrete_function(variables, inputs)
    except Exception:  # such as a GAN, which has no forward pass: there is no estimate
        return 0
    return sum(found.values()) // _FEW_ROWS


def _few_rows(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec((_FEW_ROWS, *spec.shape[1:]), spec.dtype)


def _num_bytes(tensor: Any) -> int:
    shape = getattr(tensor, "shape", (None,))
    return 0 if None in shape else math.prod(shape) * tf.as_dtype(tensor.dtype).size
