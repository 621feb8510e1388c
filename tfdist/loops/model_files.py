"""Saves a model in a script that runs in several processes. Only rank 0 writes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, first_line
from tfdist.groups.agreement import from_rank0
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_model import flatten_layers

_METHODS = ("save", "save_weights", "export")
#: Methods of KerasHub's tasks, backbones and preprocessors.
_METHODS_OF_HUB = ("save_to_preset", "save_task_weights", "save_lora_weights")


def write_on_chief_only(model: keras.Model, strategy: Strategy) -> None:
    """Makes `model.save`, `save_weights` and `export` write nothing on ranks other than 0.

    The same holds for KerasHub's methods, and for models that the model contains. The same script
    runs on all ranks, and several processes that write the same file damage it. The methods do not
    wait for other ranks, because scripts may call them on rank 0 only. To write a file on each
    rank, call `keras.Model.save(model, path)`.
    """
    if strategy.group.is_chief:
        return
    for part in flatten_layers(model):
        names = (*_METHODS, *_METHODS_OF_HUB) if isinstance(part, keras.Model) else _METHODS_OF_HUB
        for name in names:
            if hasattr(type(part), name):
                setattr(part, name, functools.partial(_skip, name, strategy.group.rank))


def write_on_all(model: keras.Model) -> None:
    """Undoes `write_on_chief_only` for the methods of `keras.Model`."""
    for part in flatten_layers(model):
        for name in _METHODS:
            vars(part).pop(name, None)


def save(model: keras.Model, strategy: Strategy, path: str | os.PathLike[str]) -> None:
    """Saves a model on rank 0, and returns on every rank when the file is complete.

    Args:
        model: The model.
        strategy: The strategy.
        path: A file that ends in `.keras` or `.weights.h5`, or a folder without a suffix for a
            SavedModel.

    Raises:
        ConfigurationError: The file cannot be written, or has another suffix.
    """
    text = os.fspath(path)
    method = "save" if Path(text).suffix else "export"  # Keras refuses unknown suffixes
    if text.endswith(".weights.h5"):
        method = "save_weights"
    write: Callable[..., Any] = getattr(model, method)

    def on_chief() -> str:
        try:
            write(text, **({"verbose": False} if method == "export" else {}))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise ConfigurationError(f"Cannot write {text}: {first_line(error)}") from error
        return ""

    from_rank0(strategy.group, on_chief)


def _skip(name: str, rank: int, path: Any = "", *args: Any, **options: Any) -> None:
    print(
        f"rank {rank}: model.{name}({os.fspath(path)!r}) writes only on rank 0. Call "
        f"{'trainer.save(path)' if name in _METHODS else 'trainer.wait_for_everyone()'} on all "
        "ranks to wait for the file.",
        file=sys.stderr,
    )
