"""The first step checks itself: it is compared with plain Keras on one device.

A few rows of the first batch go through Keras's own `train_step`, `test_step` or `predict_step`,
eagerly, and through the strategy's step, from the same state. Logs, weights, the optimizer's state
(with it the gradients) and outputs must be the same up to rounding. What differs by more is
compared with how much plain Keras itself changes if its weights change by a rounding error.
Nothing of this changes the training.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError, TfdistError, VerificationError
from tfdist.loops import first_rows
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.functions import CompiledFunctions, Loop
from tfdist.loops.program_state import ProgramState, is_users, user_code
from tfdist.loops.step_values import (
    Difference,
    Value,
    Values,
    differences,
    differing_copies,
    distance,
    logs_of,
    outputs_of,
)
from tfdist.model_setup.build import root_cause
from tfdist.strategies import batches
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers, keras_training
from tfdist.upstream.keras_variables import plain_variables

#: When to verify: never, at the first use of each loop with one step, or with so many steps. None:
#: as `"first"` if the model contains code that is not Keras's, and verifying it is cheap.
Verify = Literal["off", "first"] | int | None

#: Environment variable that replaces None, for unchanged scripts.
VARIABLE = "TFDIST_VERIFY"
#: The largest state that is verified by default. It is in memory up to three times.
_MAX_BYTES = 256 << 20
_PERTURBED_RUNS = 3
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
_BY_COMMAND = "not verified ({}): run `tfdist verify` with this script"


class SelfCheck:
    """Verifies the steps of a trainer, each loop at its first use.

    Args:
        model: The model.
        strategy: Runs the replicas.
        functions: The model's compiled functions.
        microbatches: Micro-batches of each replica.
        inexact: Returns why training does not match one device by design, by name.
        mode: When to verify.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        functions: CompiledFunctions,
        microbatches: int,
        inexact: Callable[[], Mapping[str, str]],
        mode: Verify = None,
    ) -> None:
        self._model, self._strategy, self._functions = model, strategy, functions
        self._num_parts = strategy.num_replicas * microbatches
        self._inexact = inexact
        self.mode: Verify = checked_mode(os.environ.get(VARIABLE) or None) if mode is None else mode
        self._verified: dict[Loop, Any] = {}
        self.status = "no" if self.mode == "off" else "at the first step"

    def at_first_use(self, loop: Loop, data: DataHandler, run: Any) -> str | None:
        """Verifies a loop if it is due, and returns a line about it.

        All workers must call it.

        Args:
            loop: Keras's name of the loop.
            data: The data, whose first batch is used.
            run: The function of this loop, from `functions`.

        Raises:
            VerificationError: The strategy's step differs from plain Keras.
        """
        compilation = keras_model.compile_config(self._model)
        is_done = loop in self._verified and self._verified[loop] is compilation
        if self.mode == "off" or is_done:
            return None
        self._verified[loop] = compilation
        if self.mode is None and not user_code(self._model):
            self.status = "not necessary: all code is Keras's"
            return None
        reason = self._reason_against(loop, data)
        if reason is None and self.mode is None and self._num_bytes() > _MAX_BYTES:
            reason = f"its state has more than {_MAX_BYTES >> 20} MB"
        if reason is not None:
            self.status = _BY_COMMAND.format(reason)
            return self.status
        steps = self.mode if isinstance(self.mode, int) else 2
        self.status = self.verify(loop, data, run, steps)
        return self.status

    def verify(self, loop: Loop, data: DataHandler, run: Any, num_steps: int) -> str:
        """Compares steps with plain Keras. Arguments and errors are as in `at_first_use`.

        Returns:
            A line with the result and the time that it took.
        """
        if (reason := self._reason_against(loop, data)) is not None:
            return f"not verified: {reason}"
        began, tables = time.perf_counter(), self._functions.variables()
        variables = [v for group in tables.values() for v in group]
        state = ProgramState(self._model, [*variables, *self._waiting(), *self._rates()])
        parts, plain = self._plain_on_few_rows(loop, data, num_steps, state)
        if isinstance(plain, str):
            return f"not verified: plain Keras's eager {loop} step failed: {plain}"
        middle = time.perf_counter()
        try:
            result = self._by_strategy(loop, data, run, parts, plain, state)
        except Exception as error:
            if isinstance(error, TfdistError) and not isinstance(error, DataError):
                raise  # a refusal, or a lost worker
            raise VerificationError(
                f"The {loop} step under {self._strategy.name!r} failed, which plain Keras computes "
                f"with the same {int(batches.num_rows(parts[0]))} rows: {error}"
            ) from error
        finally:
            self._restore(state)
        of_strategy = time.perf_counter() - middle
        if loop == "train":
            self._add_beginning(result, plain)
        epsilon, spread = self._rounding(), dict[str, float]()
        differing = differences(result, plain, epsilon)
        if self._any_rank(bool(differing)):
            spread = self._spread(loop, parts, plain, state)
            differing = differences(result, plain, epsilon, spread)
        self._raise_on_all(differing)
        seconds = time.perf_counter() - began - of_strategy
        num_drawn = sum(map(np.isinf, spread.values()))
        drawn = f", except {num_drawn} values that plain Keras draws anew" if num_drawn else ""
        return (
            f"verified: {num_steps} {loop} steps match plain Keras on one device{drawn} "
            f"(took {seconds:.1f} s, and {of_strategy:.1f} s for the steps that are compiled now)"
        )

    # ---- whether ----

    def _reason_against(self, loop: Loop, data: DataHandler) -> str | None:
        """Returns why a loop cannot be compared with one device, the same on all workers."""
        if data.own_rows and self._strategy.group.size > 1:
            return "every worker reads its own rows"
        reasons = dict(self._strategy.inexact)
        if loop == "train" and not data.full_batches:
            reasons |= self._inexact()
            if "BatchNorm" in reasons and not keras_model.drawing_layers(self._model):
                del reasons["BatchNorm"]  # see `few_rows`
        return "; ".join(f"{name}: {why}" for name, why in reasons.items()) or None

    def _num_bytes(self) -> int:
        groups = self._functions.variables().values()
        sizes = (np.prod(v.shape) * 4.0 for group in groups for v in group)
        return int(sum(sizes))

    def _waiting(self) -> list[Any]:
        accumulation = self._functions.accumulation
        return keras.tree.flatten(accumulation.waiting) if accumulation else []

    def _rates(self) -> list[keras.Variable]:
        """Returns hyperparameters that are variables, which callbacks may set between steps."""
        rates = []
        for optimizer in keras_optimizers.optimizers_of(self._model):
            if (rate := keras_optimizers.learning_rate_variable(optimizer)) is not None:
                rates.append(rate)
            inner = keras_optimizers.unwrapped(optimizer)
            values = [v for v in vars(inner).values() if isinstance(v, keras.Variable)]
            rates += [v for v in values if v.shape == () and "float" in v.dtype]
        return list({id(v): v for v in rates}.values())

    # ---- the two computations ----

    def _plain_on_few_rows(
        self, loop: Loop, data: DataHandler, num_steps: int, state: ProgramState
    ) -> tuple[list[Any], Values | str]:
        """Computes steps with plain Keras, on the full batch if a few rows are not enough.

        Returns:
            The batches, and what Keras computed, or why it could not.
        """
        plain: Values | str = ""
        alike = loop == "train" and not data.full_batches and "BatchNorm" in self._inexact()
        few = first_rows.few_rows(data, self._num_parts, num_steps, alike)
        for parts in (few, [data.first_batch()] * num_steps):
            try:
                plain = self._plain(loop, parts, state)
            except Exception as error:
                plain = root_cause(error)
            finally:
                self._restore(state)
            if not self._any_rank(isinstance(plain, str)):
                return parts, plain
        return parts, plain if isinstance(plain, str) else "on another worker"

    def _plain(self, loop: Loop, parts: Sequence[Any], state: ProgramState) -> Values:
        """Returns what Keras's own function of a loop computes, eagerly, from now on."""
        model, values, is_traced = self._model, Values(), not self._model.run_eagerly
        with ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            groups = self._functions.variables().values()
            stack.enter_context(plain_variables([v for group in groups for v in group]))
            for optimizer in keras_optimizers.optimizers_of(model):
                stack.enter_context(keras_optimizers.methods_of_class(optimizer))
            function = stack.enter_context(keras_model.eager_function(model, loop))
            self._reset_metrics()
            for step, part in enumerate(parts):
                if is_traced:
                    state.restore_python()  # as in the first step, whose Python is traced
                before = self._state_values()
                outputs = function([part]) if loop == "predict" else function(iter([part]))
                if loop != "predict":  # the logs of an epoch
                    outputs = keras_training.metrics_or_logs(model, outputs)
                values |= self._after(loop, step, before, outputs)
                self._halve_rates(loop)
        return values

    def _by_strategy(
        self,
        loop: Loop,
        data: DataHandler,
        run: Any,
        parts: Sequence[Any],
        plain: Values,
        state: ProgramState,
    ) -> Values:
        """Returns what the strategy's steps compute, each from the state that plain Keras had.

        Otherwise, rounding errors of a step could be larger in the next one.
        """
        values, is_traced = Values(), not self._model.run_eagerly
        iterator = first_rows.iterator(parts, data, self._strategy)
        with self._functions.trial_steps():
            self._reset_metrics()
            for step in range(len(parts)):
                if is_traced:
                    state.restore_python()  # as in the first step, whose Python is traced
                self._functions.sync_copies()
                before = self._state_values()
                _, outputs = run(iterator, 1)
                if loop == "predict":
                    outputs = [keras.tree.flatten(piece) for piece in outputs]
                    outputs = [_concatenated(leaves) for leaves in zip(*outputs, strict=True)]
                else:
                    outputs = self._functions.epoch_logs(outputs, loop)
                if loop == "train":  # the others synchronize the replicas when they begin
                    values |= differing_copies(f"step {step + 1}", self._compared_variables())
                values |= self._after(loop, step, before, outputs)
                for name, variable in self._named_variables().items():
                    if (name := f"{name} after step {step + 1}") in plain:
                        variable.assign(plain[name].new)
                self._halve_rates(loop)
        return values

    def _add_beginning(self, result: Values, plain: Values) -> None:
        """Adds the first state of an optimizer of the user's class, as Keras's `fit` builds it.

        `fit` does so in a graph, which loses what `build` assigns.
        """
        model = self._model
        optimizer = model.optimizer
        if optimizer is None or not is_users(optimizer) or int(np.array(optimizer.iterations)):
            return
        try:
            new = keras_optimizers.new_like(optimizer)
            build = tf.function(lambda: new.build(model.trainable_variables), autograph=False)
            with plain_variables(model.trainable_variables):
                new.build(model.trainable_variables) if model.run_eagerly else (
                    build.get_concrete_function()
                )
        except Exception:  # a class without `get_config` cannot be created again
            return
        if len(new.variables) != len(optimizer.variables):
            return
        for own, other in zip(optimizer.variables, new.variables, strict=True):
            name = f"{own.path} before step 1"
            result[name], plain[name] = (Value(np.array(v.value)) for v in (own, other))

    def _after(self, loop: Loop, step: int, before: Values, outputs: Any) -> Values:
        """Returns the values after a step."""
        place = f"step {step + 1}"
        named = logs_of(outputs) if loop != "predict" else outputs_of(outputs)
        values = {f"{name!r} of {place}": Value(new) for name, new in named.items()}
        for name, value in self._state_values().items():
            values[f"{name} after {place}"] = Value(value.new, before[name].new)
        return values

    def _halve_rates(self, loop: Loop) -> None:
        """Changes the hyperparameters that callbacks may change between two steps."""
        for number, rate in enumerate(self._rates() if loop == "train" else ()):
            rate.assign(rate.value * (0.9 if number else 0.5))

    def _compared_variables(self) -> dict[str, list[keras.Variable]]:
        groups = self._functions.variables()
        return {n: v for n, v in groups.items() if n not in ("metrics", "steps", "loss scale")}

    def _state_values(self) -> Values:
        variables = self._named_variables()
        return {name: Value(np.array(variable.value)) for name, variable in variables.items()}

    def _named_variables(self) -> dict[str, keras.Variable]:
        """Returns the variables that the model and its optimizers have, by names for messages."""
        return {
            f"{owner} variable {number} ({variable.path})": variable
            for owner, variables in self._compared_variables().items()
            for number, variable in enumerate(variables)
            # Replicas accumulate gradients themselves.
            if not variable.name.endswith("gradient_accumulator") and variable.dtype != "string"
        }

    def _reset_metrics(self) -> None:
        if self._model.compiled:
            self._model.reset_metrics()

    def _restore(self, state: ProgramState) -> None:
        state.restore()
        self._functions.sync_copies()

    # ---- the comparison ----

    def _spread(
        self, loop: Loop, parts: Sequence[Any], plain: Values, state: ProgramState
    ) -> dict[str, float]:
        """Returns by how much rounding errors in the weights change what plain Keras computes.

        What plain Keras computes anew with other results is not comparable: `tf.random` draws
        other numbers eagerly than in a graph, and a program may read an iterator.
        """
        spread: dict[str, float] = {}
        random = np.random.default_rng(0)
        for number in range(1 + _PERTURBED_RUNS):
            tf.random.uniform(())  # so that `tf.random` draws others
            for weight in self._model.trainable_variables if number else ():
                value = np.array(weight.value)
                factor = 1 + self._rounding() * random.uniform(-4, 4, value.shape)
                weight.assign((value * factor).astype(value.dtype))
            try:
                other = self._plain(loop, parts, state)
            finally:
                self._restore(state)
            if not number:
                spread = {d.name: np.inf for d in differences(other, plain, self._rounding())}
            for name in plain:
                size = distance(other[name].new, plain[name].new) if name in other else np.inf
                spread[name] = max(spread.get(name, 0.0), size)
        return spread

    def _rounding(self) -> float:
        """Returns the rounding error of the least precise number format of the model."""
        layers = keras_model.flatten_layers(self._model)
        return max(_EPSILON.get(layer.compute_dtype, 0.0) for layer in layers) or 2.0**-52

    def _any_rank(self, flag: bool) -> bool:
        return bool(self._strategy.group.gather([flag]).any())

    def _raise_on_all(self, differing: Sequence[Difference]) -> None:
        """Raises an error on all workers if one of them found a difference."""
        by_rank = self._strategy.group.gather_objects(list(differing[:1]))
        rank, first = next(((i, each[0]) for i, each in enumerate(by_rank) if each), (0, None))
        if first is None:
            return
        users = user_code(self._model)
        code = f" The model's own code: {', '.join(users[:5])}." if users else ""
        where = f" on rank {rank}" if len(by_rank) > 1 else ""
        size = (
            f"is off by {first.size:.3g} (plain Keras: {first.changed:.3g}; rounding explains "
            f"{first.rounding:.1g})"
            if np.isfinite(first.size)
            else "is missing, or has another shape or type"
        )
        raise VerificationError(
            f"The first steps under {self._strategy.name!r} differ from plain Keras on one device"
            f"{where}: {first.name} {size}. Nothing was changed or trained.{code}\n"
            "Train on one device with plain Keras, or pass verify='off' (--verify off) to train "
            "with these numbers, and report the program: https://github.com/tfdist/tfdist/issues."
        )


def checked_mode(value: Any) -> Verify:
    """Returns a valid value of `verify`.

    Raises:
        ConfigurationError: It is neither `"off"`, `"first"`, a number of steps, nor None.
    """
    if value is None or value in ("off", "first"):
        return value
    if not isinstance(value, bool) and str(value).isdecimal() and int(value) > 0:
        return int(value)
    raise ConfigurationError(f"verify={value!r}: expected 'off', 'first', or a number of steps.")


def _concatenated(leaves: Sequence[Any]) -> Any:
    """Returns the outputs of replicas, joined along the rows as `predict` does."""
    if len(leaves) == 1 or not getattr(leaves[0], "shape", ()):
        return leaves[0]
    filled = [leaf for leaf in leaves if leaf.shape[0] != 0] or [leaves[0]]
    return filled[0] if len(filled) == 1 else tf.concat(filled, 0)
