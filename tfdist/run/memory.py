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
from tfdist.patches.remat import exact_remat
from tfdist.upstream.tensorflow_graphs import kept_bytes

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

#: Variables of the optimizer for each weight.
_SLOTS = {"adam": 2, "lamb": 2, "sgd": 1, "lars": 1}
#: Rows of the traced forward pass. More than one, because an axis of size one is broadcast.
_FEW_ROWS = 2
_CGROUP = Path("/sys/fs/cgroup")


def shortage(config: TrainConfig, model: Any, strategy: Strategy, spec: Any) -> str:
    """Returns a warning if training needs more memory than available; empty if it may fit.

    The estimate is a lower bound: one copy of gradients and optimizer state, and what the forward
    pass keeps for the backward pass. On GPUs, only `--memory` tells how much there is.
    """
    on_gpus = any(name.upper().startswith("GPU") for name in strategy.devices)
    num_parts = strategy.num_replicas if on_gpus else max(1, strategy.group.size)
    rows = math.ceil(config.batch_size / (num_parts * config.accumulate))
    weights = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.trainable_variables)
    state = weights * (1 + _SLOTS.get(config.optimizer, 0))
    is_kept = config.remat == "none" and not config.offload_activations
    activations = is_kept * rows * _row_bytes(model, spec)
    limits = [] if config.memory == "grow" else [int(config.memory) * 2**20]
    if not on_gpus:
        limits += [psutil.virtual_memory().available, *_cgroup_limits()]
    room = min(limits, default=None)
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
    """Returns the bytes of one row that the forward pass keeps for the backward pass."""
    inputs = tf.nest.map_structure(_few_rows, keras.utils.unpack_x_y_sample_weight(spec)[0])
    variables = tf.nest.map_structure(
        lambda variable: tf.TensorSpec(variable.shape, variable.dtype),
        (model.trainable_variables, model.non_trainable_variables),
    )
    kept = 0

    @tf.function(autograph=False)
    def forward_backward(weights: Any, x: Any) -> None:
        nonlocal kept
        graph = tf.compat.v1.get_default_graph()
        outputs, _ = model.stateless_call(*weights, x, training=True)
        end = len(graph.get_operations())
        floats = [tensor for tensor in tf.nest.flatten(outputs) if tensor.dtype.is_floating]
        tf.gradients(floats, weights[0])
        traced = graph.get_operations()
        kept = kept_bytes(traced[:end], traced[end:], floats)

    # A GAN has no forward pass, for example: then there is no estimate.
    with contextlib.suppress(Exception), exact_remat():
        forward_backward.get_concrete_function(variables, inputs)
    return kept // _FEW_ROWS


def _few_rows(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec((_FEW_ROWS, *spec.shape[1:]), spec.dtype)
