"""What a model's class and layers ask of a trainer: overrides, saving, and what is not exact.

Overrides of `fit`, `evaluate`, `predict`, `make_train_function` and the like are honored.

KerasHub's tasks preprocess strings in the former, and other models add callbacks. A trainer calls
the override, and replaces the method of `keras.Model` that the override calls with `super()`.

An override of `make_train_function` may wrap the function that Keras's method makes, which is
called for each batch: the wrapper is called with tfdist's steps inside.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import keras
import tensorflow as tf

from tfdist.console import tables
from tfdist.errors import ConfigurationError, UnsupportedModelError, first_line
from tfdist.groups.agreement import from_rank0
from tfdist.patches.batch_norm import layers_of
from tfdist.replica.replica import StepOptions
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.upstream.keras_model import (
    drawing_layers,
    flatten_layers,
    is_assigned,
    overrides,
    redefined,
)
from tfdist.upstream.keras_training import WITHIN_FIT, functions_made, is_function_of_keras
from tfdist.upstream.patching import replaced

#: Makes a number of steps on batches of an iterator.
StepsFn = Callable[[Any, int], tuple[LoopResult, Logs]]

Method = TypeVar("Method", bound=Callable[..., Any])

_CALLER = "_override_that_calls"  # attribute of a trainer


def honor_overrides(method: Method) -> Method:
    """Wraps a method of a trainer so that it runs the override of the model's class, if any."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not overrides(self.model, name) or vars(self).pop(_CALLER, None) == name:
            return method(self, *args, **options)
        if is_assigned(self.model, name):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}.{name} is set on the model itself, and would call "
                f"Keras's own {name} on one device. Override {name} in the model's class."
            )
        keras_method = getattr(keras.Model, name)
        given = args, {key: value for key, value in options.items() if key != WITHIN_FIT}

        def replacement(model: keras.Model, *args: Any, **options: Any) -> Any:
            if model is not self.model:
                return keras_method(model, *args, **options)
            if options.pop(WITHIN_FIT, False):  # Keras ignores the data that the override passes
                args, options = given
            with replaced(keras.Model, name, keras_method):  # callbacks see a plain model
                return method(self, *args, **options)

        # tensorflow-text keeps vocabularies in a cached kernel, which `keras.utils.set_random_seed`
        # drops.
        for layer in flatten_layers(self.model):
            if hasattr(layer, "set_proto") and layer.proto is not None:
                layer.set_proto(layer.proto)
        with replaced(keras.Model, name, replacement):
            return getattr(self.model, name)(*args, **options)

    return cast(Method, call)


def note_override(trainer: Any, name: str) -> None:
    """Makes the next call of a trainer's method run it, and not the override of the model's class.

    For a method that replaces the one of `keras.Model`: an override has already run and called it.
    """
    vars(trainer)[_CALLER] = name


class ModelFunction:
    """What a model's `make_train_function` or `make_test_function` makes, around tfdist's steps.

    Args:
        model: The model, which may redefine the method.
        loop: `"train"` or `"test"`.
    """

    def __init__(self, model: keras.Model, loop: str) -> None:
        self._model, self._loop = model, loop
        self._name, self._attribute = f"make_{loop}_function", f"{loop}_function"
        self._cause = redefined(model, self._name) or ""
        self._function: Any = None
        self._steps: Any = None
        self._results: list[LoopResult] = []

    def make(self) -> None:
        """Calls the model's method, as Keras does at the beginning of each loop.

        Raises:
            UnsupportedModelError: The method does not call the one that it overrides.
        """
        check_function(self._model, self._loop)
        if not self._cause:
            return
        before = getattr(self._model, self._attribute)
        setattr(self._model, self._attribute, self._function)
        with functions_made(self._one_step) as made:
            getattr(self._model, self._name)()
        is_new, self._function = self._function is None, getattr(self._model, self._attribute)
        setattr(self._model, self._attribute, before)
        if self._function is None or (is_new and not made):
            raise _refused(self._cause, self._loop, "does not call the method that it overrides")

    def around(self, steps: StepsFn, sync: Callable[[], None]) -> StepsFn:
        """Returns steps that run inside of the function, one in each call of it."""
        if not self._cause:
            return steps

        def call(iterator: Any, num_steps: int) -> tuple[LoopResult, Logs]:
            self._steps, self._results, logs = steps, [], dict[str, Any]()
            for number in range(1, num_steps + 1):
                try:
                    logs = self._function(iterator)
                except StopIteration:
                    break
                if (made := len(self._results) - number + 1) != 1:
                    raise _refused(self._cause, self._loop, f"made {made} steps in a call")
                sync()
            return LoopResult(*map(sum, zip(*self._results, strict=True))), logs

        return call

    def _one_step(self, iterator: Any) -> Logs:
        result, logs = self._steps(iterator, 1)
        self._results.append(result)
        if not result.num_steps:
            raise StopIteration
        return logs


def check_function(model: keras.Model, loop: str) -> None:
    """Refuses a function for batches that user code has set, and one that predicts.

    Raises:
        UnsupportedModelError: There is one.
    """
    name = f"{loop}_function"
    if not is_function_of_keras(getattr(model, name)):
        raise _refused(f"{type(model).__name__}.{name}", loop, "is set to a function")
    cause = redefined(model, "make_predict_function")
    if loop == "predict" and cause is not None:
        raise _refused(cause, loop, "runs without the replicas")


def _refused(cause: str, loop: str, why: str) -> UnsupportedModelError:
    way_out = f"Override {loop}_step instead"
    if loop != "predict":
        way_out += (
            f", or make_{loop}_function such that it calls super().make_{loop}_function() and then "
            f"replaces self.{loop}_function by a function that calls it once"
        )
    return UnsupportedModelError(f"{cause} {why}, so tfdist cannot split its work. {way_out}.")


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


class ExactnessReport:
    """Reports, once, why a trainer's results will not match single-device training."""

    def __init__(
        self, model: keras.Model, strategy: Strategy, options: StepOptions, is_rebuilt: bool
    ) -> None:
        self._model, self._strategy, self._options = model, strategy, options
        self._is_rebuilt = is_rebuilt
        self._is_reported = False

    def reported(self) -> str:
        """Returns the report for a table; `print_once` then prints nothing."""
        self._is_reported = True
        return self._text() or "nothing"

    def print_once(self, needs_full_batch: bool) -> None:
        """Prints the report on the chief, unless it was reported before.

        Args:
            needs_full_batch: Whether the step gets full batches, which are exact.
        """
        if self._is_reported or not self._strategy.group.is_chief:
            return
        self._is_reported = True
        if self._is_rebuilt:
            tables.text(
                "The trainer trains trainer.model. The model that you passed is not changed."
            )
        if not needs_full_batch and (text := self._text()):
            tables.text(f"not exact: {text}")

    def reasons(self) -> dict[str, str]:
        """Returns why training will not match one device, by option or layer."""
        reasons, options = dict(self._strategy.inexact), self._options
        if self._strategy.num_replicas * options.accumulate > 1:
            layers = layers_of(self._model)
            if not all(options.sync_batch_norm or layer.synchronized for layer in layers):
                use = "sync_batch_norm" + (" without accumulate" if options.accumulate > 1 else "")
                reasons["BatchNorm"] = f"each replica uses its own moments; use {use}"
            if options.replica_random and drawing_layers(self._model):
                reasons["random layers"] = "each replica uses different random numbers"
        return reasons

    def _text(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.reasons().items())
