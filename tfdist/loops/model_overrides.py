"""Honors overrides of `fit`, `evaluate` and `predict`, and of `make_train_function` and the like.

KerasHub's tasks preprocess strings in the former, and other models add callbacks. A trainer calls
the override, and replaces the method of `keras.Model` that the override calls with `super()`.

An override of `make_train_function` may wrap the function that Keras's method makes, which is
called for each batch: the wrapper is called with tfdist's steps inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import keras

from tfdist.errors import UnsupportedModelError
from tfdist.strategies.inner_loop import Logs, LoopResult
from tfdist.upstream.keras_model import overrides, redefined
from tfdist.upstream.keras_training import WITHIN_FIT, is_function_of_keras
from tfdist.upstream.patching import replaced

Method = TypeVar("Method", bound=Callable[..., Any])


def honor_overrides(method: Method) -> Method:
    """Wraps a method of a trainer so that it runs the override of the model's class, if any."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not overrides(self.model, name):
            return method(self, *args, **options)
        keras_method = getattr(keras.Model, name)

        def replacement(model: keras.Model, *args: Any, **options: Any) -> Any:
            if model is not self.model:
                return keras_method(model, *args, **options)
            options.pop(WITHIN_FIT, None)
            with replaced(keras.Model, name, keras_method):  # callbacks see a plain model
                return method(self, *args, **options)

        with replaced(keras.Model, name, replacement):
            return getattr(self.model, name)(*args, **options)

    return cast(Method, call)


def wrapped_by_model(
    model: keras.Model,
    loop: str,
    steps: Callable[[Any, int], tuple[LoopResult, Logs]],
    sync: Callable[[], None],
) -> Callable[[Any, int], tuple[LoopResult, Logs]]:
    """Returns steps that run inside of what `make_train_function` or `make_test_function` makes.

    Args:
        model: The model, which may redefine the method.
        loop: `"train"` or `"test"`.
        steps: Makes a number of steps on batches of an iterator.
        sync: Called after each step, because the model's function may change variables.

    Raises:
        UnsupportedModelError: The method does not call the one that it overrides.
    """
    check_function(model, loop)
    name, attribute = f"make_{loop}_function", f"{loop}_function"
    if (cause := redefined(model, name)) is None:
        return steps
    made: list[Any] = []
    results: list[LoopResult] = []

    def one_step(iterator: Any) -> Logs:
        result, logs = steps(iterator, 1)
        results.append(result)
        if not result.num_steps:
            raise StopIteration
        return logs

    def make(model: keras.Model, force: bool = False) -> Any:
        del force
        made.append(one_step)
        setattr(model, attribute, one_step)
        return one_step

    before = getattr(model, attribute)
    with replaced(keras.Model, name, make):
        getattr(model, name)()
    function = getattr(model, attribute)
    setattr(model, attribute, before)
    if not made or function is None:
        raise _refused(cause, loop, "does not call the method that it overrides")

    def call(iterator: Any, num_steps: int) -> tuple[LoopResult, Logs]:
        results.clear()
        logs: Logs = {}
        for number in range(1, num_steps + 1):
            try:
                logs = function(iterator)
            except StopIteration:
                break
            if len(results) != number:
                raise _refused(cause, loop, f"made {len(results) - number + 1} steps in a call")
            sync()
        return LoopResult(*map(sum, zip(*results, strict=True))), logs

    return call


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
