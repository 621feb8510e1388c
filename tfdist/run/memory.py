"""Warns if training will not fit into the memory of the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tfdist.config import TrainConfig
from tfdist.console import sizes

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

#: Variables of the optimizer for each weight.
_SLOTS = {"adam": 2, "lamb": 2, "sgd": 1, "lars": 1}
_CGROUP = Path("/sys/fs/cgroup")


def shortage(config: TrainConfig, model: Any, strategy: Strategy) -> str:
    """Returns a warning if training needs more memory than available; empty if it may fit.

    The estimate costs no computation and is a lower bound: one copy of gradients and optimizer
    state, and the outputs of layers with weights, which the backward pass needs. On GPUs, only
    `--memory` tells how much there is.

    Args:
        config: The configuration.
        model: The compiled `keras.Model`, built or not.
        strategy: The strategy.
    """
    on_gpus = any(name.upper().startswith("GPU") for name in strategy.devices)
    num_parts = strategy.num_replicas if on_gpus else max(1, strategy.group.size)
    rows = math.ceil(config.batch_size / (num_parts * config.accumulate))
    weights = sum(math.prod(v.shape) * _item_size(v.dtype) for v in model.trainable_variables)
    state = weights * (1 + _SLOTS.get(config.optimizer, 0))
    activations = 0 if config.remat != "none" else rows * _row_bytes(model)
    room = _room(config, on_gpus)
    if room is None or state + activations <= room:
        return ""
    return (
        f"Training needs at least {sizes.format_bytes(state + activations)} more memory "
        f"({sizes.format_bytes(state)} for gradients and optimizer state, "
        f"{sizes.format_bytes(activations)} for activations of {rows} rows), but "
        f"only {sizes.format_bytes(room)} are available, so it may be killed. Use a smaller "
        f"--batch-size, --accumulate {2 * config.accumulate}, or --remat all; python -m "
        "tfdist.plan memory predicts what fits."
    )


def _room(config: TrainConfig, on_gpus: bool) -> int | None:
    """Returns the available memory in bytes; None if it is not known."""
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


def _row_bytes(model: Any) -> int:
    """Returns the bytes of one row of the outputs of all layers with weights."""
    total = 0
    for layer in _layers(model):
        if not layer.weights:
            continue
        try:
            outputs = layer.output
        except (AttributeError, ValueError):  # a subclassed model that has no symbolic outputs
            continue
        for tensor in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            shape = getattr(tensor, "shape", ())[1:]
            if None not in shape:
                total += math.prod(shape) * _item_size(layer.compute_dtype)
    return total


def _layers(model: Any) -> Iterable[Any]:
    """Yields the layers of a model and of the models in it."""
    for layer in model.layers:
        if hasattr(layer, "layers"):
            yield from _layers(layer)
        else:
            yield layer


def _item_size(dtype: Any) -> int:
    return 2 if "16" in str(dtype) else 8 if "64" in str(dtype) else 4
