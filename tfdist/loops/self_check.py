"""The first step checks itself: it is compared with plain Keras on one device.

A few rows of the first batch go through Keras's own `train_step`, `test_step` or `predict_step`,
eagerly, and through the strategy's step, from the same state. Logs, weights, the optimizer's state
(with it the gradients) and outputs must be the same up to rounding. What differs by more is
compared with how much plain Keras itself changes if weights, data and the outputs of all layers
have small errors.
Nothing of this changes the training.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import devices
from tfdist.errors import ConfigurationError, DataError, TfdistError, VerificationError
from tfdist.loops.data_handler import DataHandler, Given, OneBatch
from tfdist.loops.epoch import check_same_batches
from tfdist.loops.functions import Loop, Steps
from tfdist.loops.model_methods import ExactnessReport
from tfdist.loops.observers import RunContext
from tfdist.loops.outputs import concatenated
from tfdist.model_setup.build import root_cause
from tfdist.replica.program_state import ProgramState, is_users, user_code
from tfdist.step.state import flat
from tfdist.strategies import batches
from tfdist.strategies.base import Strategy
from tfdist.strategies.mirrored_variables import first_difference
from tfdist.upstream import keras_model, keras_optimizers, keras_training
from tfdist.upstream.keras_layers import operations_called_through
from tfdist.upstream.keras_variables import plain_variables
from tfdist.upstream.tensorflow_runtime import draws_undone

#: A difference may be so many times as large as the changes that errors of values cause. The errors
#: are large enough that some values pass the kink of a ReLU, as one in a hundred thousand does
#: whose rounding errors are others.
_TIMES_SPREAD = 2
_ERRORS_OF_ROUNDING = 128
#: Logs that Keras does not have.
_EXTRA_LOGS = {"gradient_norm", "loss_scale", "skipped_steps"}


class Value(NamedTuple):
    """A value after a step, and before it, by which a change is measured."""

    new: np.ndarray
    old: np.ndarray | float = 0.0


#: What steps have computed, by names that tell the step.
Values = dict[str, Value]


class Difference(NamedTuple):
    """The first value that differs from plain Keras.

    Attributes:
        name: Name of the value.
        size: Largest absolute difference.
        changed: What plain Keras changed it by, or its value if it is a log or an output.
        rounding: The largest difference that rounding explains.
    """

    name: str
    size: float
    changed: float
    rounding: float


def differences(
    result: Values, plain: Values, epsilon: float, spread: Mapping[str, float] | None = None
) -> list[Difference]:
    """Returns the values that differ by more than rounding, in the order of computation.

    Args:
        result: The values to check.
        plain: The right ones.
        epsilon: The rounding error of the number format.
        spread: By how much small errors change the right ones, by name.
    """
    relative = min(800 * epsilon, epsilon**0.5)
    differing = []
    for name, (expected, old) in plain.items():
        new = result[name].new if name in result else np.array(np.nan)
        if not np.issubdtype(expected.dtype, np.number):
            if not np.array_equal(new, expected):
                differing.append(Difference(name, np.inf, 0.0, 0.0))
            continue
        changed = distance(expected, np.asarray(old))
        rounding = 8 * epsilon * _largest(expected) + relative * changed
        rounding = max(rounding, _TIMES_SPREAD * (spread or {}).get(name, 0.0))
        if not (size := distance(new, expected)) <= rounding:
            differing.append(Difference(name, size, changed, rounding))
    for name in sorted(result.keys() - plain.keys()):
        if not any(f"'{log}'" in name for log in _EXTRA_LOGS):
            differing.append(Difference(name, _largest(result[name].new), 0.0, 0.0))
    return differing


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(np.nan_to_num(np.asarray(array, np.float64))), initial=0.0))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest absolute difference; infinite for other shapes or NaN in one of them."""
    if np.shape(one) != np.shape(other) and np.shape(other) != ():
        return np.inf
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.nan_to_num(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0), nan=np.inf))


#: When to verify: never, at the first use of each loop with one step, or with so many steps. None:
#: as `"first"` if the model contains code that is not Keras's, and verifying it is cheap.
Verify = Literal["off", "first"] | int | None

#: Environment variable that replaces None, for unchanged scripts.
VARIABLE = "TFDIST_VERIFY"
#: The largest state that is verified by default. It is in memory up to three times.
_MAX_BYTES = 256 << 20
_PERTURBED_RUNS = 4
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "tf32": 2.0**-10, "float32": 2.0**-23}
_BY_COMMAND = "not verified ({}): run `tfdist verify` with this script"


class SelfCheck:
    """Verifies the steps of a trainer, each loop at its first use."""

    def __init__(
        self, run: RunContext, microbatches: int, exactness: ExactnessReport, mode: Verify = None
    ) -> None:
        self._model, self._strategy, self._functions = run.model, run.strategy, run.functions
        self._num_parts = run.strategy.num_replicas * microbatches
        self._inexact = exactness.reasons
        self.mode: Verify = checked_mode(os.environ.get(VARIABLE) or None) if mode is None else mode
        self._verified: dict[Loop, Any] = {}
        self.status = "no" if self.mode == "off" else "at the first step"

    def at_first_use(self, loop: Loop, data: DataHandler, run: Steps) -> str | None:
        """Verifies a loop if it is due, and returns a line about it.

        All workers must call it.

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
        reason = self._reason_against(loop, data, run)
        num_bytes = sum(np.prod(v.shape) * 4.0 for v in self._functions.all_variables())
        if reason is None and self.mode is None and num_bytes > _MAX_BYTES:
            reason = f"its state has more than {_MAX_BYTES >> 20} MB"
        if reason is not None:
            self.status = _BY_COMMAND.format(reason)
            return self.status
        steps = self.mode if isinstance(self.mode, int) else 2
        self.status = self.verify(loop, data, run, steps)
        return self.status

    @draws_undone()
    def verify(self, loop: Loop, data: DataHandler, run: Steps, num_steps: int) -> str:
        """Compares steps with plain Keras. Arguments and errors are as in `at_first_use`.

        Returns:
            A line with the result and the time that it took.
        """
        if (reason := self._reason_against(loop, data, run)) is not None:
            return f"not verified: {reason}"
        began, accumulation = time.perf_counter(), self._functions.accumulation
        waiting = keras.tree.flatten(accumulation.waiting) if accumulation else []
        variables = self._functions.all_variables()
        first = data.first_batch()  # it is kept, and so is what reading it drew
        checksum = int(batches.checksum(first, data.check_data))
        check_same_batches(self._strategy.group.gather([checksum])[:, 0], 1)
        state = ProgramState(self._model, [*variables, *waiting, *self._rates()])
        if self._any_rank(bool(state.lost)):
            return f"not verified: a step uses {state.lost[:1]}, which cannot be set back"
        parts, plain = self._plain_on_few_rows(loop, data, run, num_steps, state)
        if isinstance(plain, str):
            return f"not verified: plain Keras's eager {loop} step failed: {plain}"
        middle = time.perf_counter()
        result = self._by_strategy(loop, data, run, parts, plain, state)
        of_strategy = time.perf_counter() - middle
        epsilon, spread = self._rounding(), dict[str, float]()
        differing = differences(result, plain, epsilon)
        in_xla = bool(self._model.jit_compile) and self._any_rank(bool(differing))
        if in_xla:  # it draws other random numbers from the same seeds
            compiled = self._plain_or_reason(loop, parts, state, in_xla)
            if in_xla := not isinstance(compiled, str):
                plain = compiled
                result = self._by_strategy(loop, data, run, parts, plain, state)
                differing = differences(result, plain, epsilon)
        if self._any_rank(bool(differing)):
            spread = self._spread(loop, parts, plain, state, in_xla)
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

    def _reason_against(self, loop: Loop, data: DataHandler, run: Steps) -> str | None:
        """Returns why a loop cannot be compared with one device, the same on all workers."""
        if data.own_rows and self._strategy.group.size > 1:
            return "every worker reads its own rows"
        reasons = dict(self._strategy.inexact)
        if loop == "train" and not run.needs_full_batch:
            reasons |= self._inexact()
            if "BatchNorm" in reasons and not keras_model.drawing_layers(self._model):
                del reasons["BatchNorm"]  # see `few_rows`
        return "; ".join(f"{name}: {why}" for name, why in reasons.items()) or None

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
        self, loop: Loop, data: DataHandler, run: Steps, num_steps: int, state: ProgramState
    ) -> tuple[list[Any], Values | str]:
        """Computes steps with plain Keras, on the full batch if a few rows are not enough.

        Returns:
            The batches, and what Keras computed, or why it could not.
        """
        alike = loop == "train" and not run.needs_full_batch and "BatchNorm" in self._inexact()
        few = few_rows(data, self._num_parts, num_steps, alike)
        plain = self._plain_or_reason(loop, few, state)
        if not isinstance(plain, str):
            return few, plain
        full = [data.first_batch()] * num_steps
        return full, self._plain_or_reason(loop, full, state)

    def _plain_or_reason(
        self, loop: Loop, parts: Sequence[Any], state: ProgramState, in_xla: bool = False
    ) -> Values | str:
        """Returns what plain Keras computes, or why it cannot, on this or on another worker."""
        plain: Values | str
        try:
            plain = self._plain(loop, parts, state, in_xla)
        except Exception as error:
            plain = root_cause(error)
        if self._any_rank(isinstance(plain, str)) and not isinstance(plain, str):
            return "on another worker"
        return plain

    def _plain(self, loop: Loop, parts: Sequence[Any], state: ProgramState, in_xla: bool) -> Values:
        """Returns what Keras's own function of a loop computes, eagerly or compiled by XLA."""
        model, is_traced = self._model, not self._model.run_eagerly  # here Keras runs eagerly
        with ExitStack() as stack:
            stack.callback(self._restore, state)
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(plain_variables(self._functions.all_variables()))
            for optimizer in keras_optimizers.optimizers_of(model):
                stack.enter_context(keras_optimizers.methods_of_class(optimizer))
            function = stack.enter_context(keras_model.plain_function(model, loop, in_xla))

            def step(number: int) -> Any:
                if loop == "predict":
                    return function([parts[number]])
                return keras_training.metrics_or_logs(model, function(iter([parts[number]])))

            return self._values_of(loop, len(parts), state if is_traced else None, step)

    def _by_strategy(
        self,
        loop: Loop,
        data: DataHandler,
        run: Steps,
        parts: Sequence[Any],
        plain: Values,
        state: ProgramState,
    ) -> Values:
        """Returns what the strategy's steps compute, each from the state that plain Keras had.

        Otherwise, rounding errors of a step could be larger in the next one.

        Raises:
            VerificationError: They fail.
        """
        iterators = batches_like(data, parts, self._strategy, run.needs_full_batch)
        copies, is_traced = Values(), not self._model.run_eagerly

        def step(number: int) -> Any:
            self._functions.sync_copies()
            _, outputs = run(iterators[number], 1)
            # The other loops synchronize the replicas when they begin.
            variables = self._named_variables().values() if loop == "train" else ()
            if (copy := first_difference([*variables])) is not None:
                where = f"{copy.variable.path} on {copy.device} after step {number + 1}"
                copies[f"the copy of {where}"] = Value(np.array(copy.largest))
            if loop == "predict":
                return concatenated(outputs)
            return self._functions.epoch_logs(outputs, loop)

        try:
            with self._functions.trial_steps():
                traced_state = state if is_traced else None
                result = self._values_of(loop, len(parts), traced_state, step, plain) | copies
        except Exception as error:
            if isinstance(error, TfdistError) and not isinstance(error, DataError):
                raise  # a refusal, or a lost worker
            raise VerificationError(
                f"The {loop} step under {self._strategy.name!r} failed, which plain Keras computes "
                f"with the same {int(batches.num_rows(parts[0]))} rows: {error}"
            ) from error
        finally:
            self._restore(state)
        if loop == "train":
            self._add_beginning(result, plain)
        return result

    def _values_of(
        self,
        loop: Loop,
        num_steps: int,
        state: ProgramState | None,
        step: Callable[[int], Any],
        plain: Values | None = None,
    ) -> Values:
        """Returns what steps compute; each begins with the state that `plain` has, if given.

        In each step, Python code finds `state`, if given: that of the one step that is traced.
        """
        values = Values()
        if self._model.compiled:
            self._model.reset_metrics()
        for number in range(num_steps):
            if state is not None:
                state.restore_python()
            when, before, outputs = f"step {number + 1}", self._state_values(), step(number)
            if loop == "predict":  # numbered; ragged and sparse ones by their values
                leaves = tf.nest.flatten(keras.tree.flatten(outputs), expand_composites=True)
                named: dict[str, Any] = {f"output {i}": leaf for i, leaf in enumerate(leaves)}
            else:
                named = flat(outputs)
            values |= {f"{n!r} of {when}": Value(np.asarray(named[n])) for n in sorted(named)}
            for name, value in self._state_values().items():
                values[f"{name} after {when}"] = Value(value.new, before[name].new)
            for name, variable in self._named_variables().items() if plain else ():
                if plain and (name := f"{name} after {when}") in plain:
                    variable.assign(plain[name].new)
            # Callbacks may change hyperparameters between two steps.
            for i, rate in enumerate(self._rates() if loop == "train" else ()):
                rate.assign(rate.value * (0.9 if i else 0.5))
        return values

    def _add_beginning(self, result: Values, plain: Values) -> None:
        """Adds the first state of an optimizer of the user's class, as Keras's `fit` builds it.

        `fit` does so in a graph, which loses what `build` assigns.
        """
        model, optimizer = self._model, self._model.optimizer
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
        for built, other in zip(optimizer.variables, new.variables, strict=True):
            name = f"{built.path} before step 1"
            result[name], plain[name] = (Value(np.array(v.value)) for v in (built, other))

    def _state_values(self) -> Values:
        variables = self._named_variables()
        return {name: Value(np.array(variable.value)) for name, variable in variables.items()}

    def _named_variables(self) -> dict[str, keras.Variable]:
        return {
            f"{owner} variable {number} ({variable.path})": variable
            for owner, variables in self._functions.variables().items()
            for number, variable in enumerate(variables)
            if owner not in ("metrics", "steps", "loss scale")
            # Replicas accumulate gradients themselves.
            and not variable.name.endswith("gradient_accumulator")
            and variable.dtype != "string"
        }

    def _restore(self, state: ProgramState) -> None:
        state.restore()
        self._functions.sync_copies()

    # ---- the comparison ----

    def _spread(
        self, loop: Loop, parts: Sequence[Any], plain: Values, state: ProgramState, in_xla: bool
    ) -> dict[str, float]:
        """Returns by how much small errors of values change what plain Keras computes.

        What plain Keras computes anew with other results is not comparable: `tf.random` draws
        other numbers eagerly than in a graph, and a program may read an iterator.
        """
        spread: dict[str, float] = {}
        seeds, varied = itertools.count(), parts
        error = min(_ERRORS_OF_ROUNDING * self._rounding(), self._rounding() ** 0.5)

        def perturbed(value: Any) -> Any:
            return with_errors(value, next(seeds), error)

        def call_perturbed(call: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = call(operation, *args, **kwargs)
            return keras.tree.map_structure(perturbed, outputs)

        for number in range(1 + _PERTURBED_RUNS):
            tf.random.uniform(())  # so that `tf.random` draws others
            with ExitStack() as stack:
                if number:
                    for weight in self._model.trainable_variables:
                        weight.assign(perturbed(weight.value + 0))
                    # An error in a weight is the same for all positions of an image, so that it
                    # cancels in a sum over them as the terms do; one in each value does not.
                    varied = tf.nest.map_structure(perturbed, parts)
                    stack.enter_context(operations_called_through(call_perturbed))
                other = self._plain(loop, varied, state, in_xla)
            if not number:
                spread = {d.name: np.inf for d in differences(other, plain, self._rounding())}
            for name in plain:
                size = distance(other[name].new, plain[name].new) if name in other else np.inf
                spread[name] = max(spread.get(name, 0.0), size)
        return spread

    def _rounding(self) -> float:
        """Returns the rounding error of the least precise number format of the model."""
        dtypes = {layer.compute_dtype for layer in keras_model.flatten_layers(self._model)}
        if "float32" in dtypes and devices.rounds_float32():
            dtypes.add("tf32")  # its rounding depends on the number of rows
        return max(_EPSILON.get(dtype, 0.0) for dtype in dtypes) or 2.0**-52

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


def with_errors(value: Any, seed: int, epsilon: float) -> Any:
    """Returns a tensor with small errors, whose gradient gets some, too.

    Each number is off by up to `epsilon`, relatively, and all of a channel by as much of their mean
    absolute value, as those from which a mean is subtracted. Whole numbers stay: they may be
    indices, as integers are.
    """
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    if keras_model.logits_of(value) is not None:  # from which Keras computes a loss in their place
        return value

    def off(tensor: tf.Tensor, number: int) -> tf.Tensor:
        dtype = tf.float64 if tensor.dtype == tf.float64 else tf.float32
        drawn = [
            tf.random.stateless_uniform(shape, (seed, 2 * number + i), -epsilon, epsilon, dtype)
            for i, shape in enumerate((tf.shape(tensor), tf.shape(tensor)[-1:]))
        ]
        exact = tf.cast(tensor, dtype)
        size = tf.reduce_mean(tf.abs(exact), [*range(len(tensor.shape) - 1)])
        return tf.cast(exact * (1 + drawn[0]) + size * drawn[1], tensor.dtype)

    @tf.custom_gradient
    def with_gradient(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        is_whole = tensor == tf.round(tensor)
        return tf.where(is_whole, tensor, off(tensor, 0)), lambda gradient: off(gradient, 1)

    result = with_gradient(value)
    if (mask := keras_model.mask_of(value)) is not None:
        keras_model.set_mask(result, mask)
    return result


def few_rows(data: DataHandler, num_parts: int, num_steps: int, alike: bool) -> list[Any]:
    """Returns small batches of the first batch, which stays as it is if its size is fixed.

    Args:
        data: The data.
        num_parts: Replicas times micro-batches. Their rows are uneven if possible.
        num_steps: Number of batches.
        alike: Whether each part gets the same rows. Then the moments of BatchNorm per replica are
            those of all rows.
    """
    batch = data.first_batch()
    total = int(batches.num_rows(batch))
    if alike:
        rows = batches.take(batch, 0, min(total, 3))
        return [tf.nest.map_structure(lambda t: _repeated(t, num_parts), rows)] * num_steps
    specs = [s for s in tf.nest.flatten(data.element_spec) if s is not None and s.shape.rank]
    if any(spec.shape[0] is not None for spec in specs):
        return [batch] * num_steps
    # All of one size: eagerly, Keras weights the losses of several outputs by rows, which it does
    # not do in a graph.
    few = min(total, 2 * num_parts + 1)
    starts = [step * few % (total - few + 1) for step in range(num_steps)]
    return [batches.take(batch, start, start + few) for start in starts]


def batches_like(
    data: DataHandler, parts: Sequence[Any], strategy: Strategy, needs_full_batch: bool
) -> list[Any]:
    """Returns an iterator for each batch, like those of an epoch: no step is traced again."""
    if isinstance(data, OneBatch):
        return [Given(part, strategy.feed, needs_full_batch) for part in parts]
    specs = tf.nest.flatten(data.element_spec)

    def relaxed(*leaves: Any) -> Any:
        loose = map(_with_shape_of, tf.nest.flatten(leaves), specs)
        return tf.nest.pack_sequence_as(parts[0], list(loose))

    one_by_one = [tf.data.Dataset.from_tensors(part).map(relaxed) for part in parts]
    dataset = functools.reduce(tf.data.Dataset.concatenate, one_by_one)
    check, own_rows = data.check_data, data.own_rows
    whole = strategy.feed.distribute(dataset, own_rows, needs_full_batch, check_data=check)
    return [iter(whole)] * len(parts)


def _with_shape_of(leaf: Any, spec: Any) -> Any:
    if spec is None or not isinstance(leaf, tf.Tensor):
        return leaf
    shape = spec.shape
    if leaf.shape != shape and shape.rank:
        shape = tf.TensorShape([None, *shape[1:]])
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=shape)


def _repeated(leaf: Any, times: int) -> Any:
    if not batches.has_rows(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.concat(0, [leaf] * times)
    return tf.concat([leaf] * times, 0)
