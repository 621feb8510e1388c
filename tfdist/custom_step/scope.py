"""The variables, tapes, and optimizers as one run of a custom step sees them.

All variables are plain tensors in a `CustomStepScope`, read once: an assignment is visible to later
code of the same step only. Gradients have to be those of variables nevertheless, so tapes watch
every value that a variable has while they record.

While a custom step runs, `patched_for_custom_step` routes its tapes, optimizers, metrics, and seed
generators to the scope. It is entered outside of the replicas, which are traced in turns; code that
runs outside of a `CustomStepScope` is not affected.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.replica.scope import ReplicaScope
from tfdist.step.loss_scaling import Scaling
from tfdist.upstream import keras_losses, keras_model, keras_optimizers
from tfdist.upstream.features import existing
from tfdist.upstream.patching import all_replaced, replaced
from tfdist.upstream.tensorflow_calls import functions_inlined


class LocalRun:
    """What may depend on rows of other replicas in a custom step. This run has all rows itself."""

    def gradients(
        self, compute: Callable[..., list], inner: bool, targets: list[tf.Tensor] | None
    ) -> list:
        """Returns the gradients of variables.

        Args:
            compute: Returns the gradients for this run's rows, times a factor if it is given one.
            inner: Whether another tape records, so that the gradients are part of a loss.
            targets: What is differentiated; None if it is multiplied by other gradients.
        """
        del inner, targets
        return compute()

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        """Returns the result of a metric; `compute` returns it for the values in the scope."""
        del scope, metric
        return compute()

    def seed(self, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the seed to use where a generator returned `drawn`."""
        return drawn


#: Values of variables, by id.
Values = dict[int, Any]


class CustomStepScope(ReplicaScope):
    """The scope of a custom step, in which tapes watch variables.

    Args:
        values: The values of variables when the step begins.
        run: Computes what may depend on the rows of other replicas.
        scalings: The scaling of each optimizer that scales its loss, by id.
        trial: Whether new variables start at zero, and optimizers without variables are noted in
            `unbuilt`.

    Attributes:
        pending: Ids of assigned variables that `ReplicaRun` has not yet summed over replicas.
        by_optimizers: Ids of variables that an optimizer assigned to.
        results: Results of metrics.
        added_losses: Losses that layers added, each with the layer.
        unbuilt: Optimizers without variables, each with the variables that it should train.
    """

    in_branch = (
        "The step assigns to {} inside of an if or a tf.while_loop, so that the replicas' "
        "variables would not change. Use tf.cond, or choose the value with tf.where and assign it "
        "outside. To accumulate gradients, use accumulate= of the Trainer or "
        "gradient_accumulation_steps= of the optimizer."
    )

    def __init__(
        self,
        values: list[tuple[keras.Variable, tf.Tensor]],
        run: LocalRun,
        scalings: Mapping[int, Scaling],
        trial: bool = False,
    ) -> None:
        super().__init__(values)
        self.state_mapping: Values
        self.run, self.scalings, self._trial = run, scalings, trial
        self.pending: set[int] = set()
        self.by_optimizers: set[int] = set()
        self.results: list[Any] = []
        self.added_losses: list[tuple[keras.Layer, Any]] = []
        self.unbuilt: list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]] = []
        self._known = {id(v): v for v, _ in values}
        self.in_optimizer = self._in_result = False
        self._open: list[tf.GradientTape] = []
        self._versions: Any = weakref.WeakKeyDictionary()

    @staticmethod
    def current() -> CustomStepScope | None:
        """Returns the scope of the current thread, or None."""
        scope = keras_model.stateless_scope()
        return scope if isinstance(scope, CustomStepScope) else None

    def get_current_value(self, variable: keras.Variable) -> Any:
        if self._trial and id(variable) not in self.state_mapping:
            self.state_mapping[id(variable)] = tf.zeros(variable.shape, variable.dtype)
            self._note(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        key = id(update[0])
        self.pending.add(key)
        if self.in_optimizer:
            self.by_optimizers.add(key)
        self._note(update[0])

    def _note(self, variable: keras.Variable) -> None:
        """Lets the tapes that record watch a new value of a variable."""
        self._known[id(variable)] = variable
        for tape in self._open:
            self._watch(tape, id(variable))

    def opened(self, tape: tf.GradientTape) -> None:
        """Lets a tape watch the variables when it begins to record."""
        self._open.append(tape)
        self._versions.setdefault(tape, {})
        for key in self._known:
            self._watch(tape, key)

    def closed(self, tape: tf.GradientTape) -> None:
        """Forgets a tape when it stops recording."""
        self._open.remove(tape)

    def _watch(self, tape: tf.GradientTape, key: int) -> None:
        value = self.state_mapping[key]
        if self._known[key].trainable and value.dtype.is_floating:
            tape.watch(value)
            self._versions[tape].setdefault(key, []).append(value)

    def watched(self, tape: tf.GradientTape, variable: keras.Variable) -> list[Any]:
        """Returns all values of a variable that a tape has watched; its gradient is their sum's."""
        return self._versions[tape].get(id(variable)) or [variable.value]

    def is_inside(self, tape: tf.GradientTape) -> bool:
        """Returns whether another tape records this tape's gradients."""
        return any(other is not tape for other in self._open)

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """Marks assignments within the block as those of an optimizer."""
        self.in_optimizer = True
        yield
        self.in_optimizer = False

    def either(
        self, condition: Any, when_true: Callable[[], Any], when_false: Callable[[], Any]
    ) -> Any:
        """Replaces `cond` where branches may assign: computes both, and selects one result."""
        values = self.state_mapping
        before = dict(values)
        out_true, if_true = when_true(), dict(values)
        values.update(before)
        out_false = when_false()
        for key, new in if_true.items():
            values[key] = new if new is values[key] else tf.where(condition, new, values[key])
        return keras.tree.map_structure(
            lambda a, b: None if a is None else tf.where(condition, a, b), out_true, out_false
        )

    def result(self, metric: keras.Metric, compute: Callable[[], Any]) -> Any:
        """Returns the result of a metric; results of metrics inside of it are part of it."""
        if self._in_result:
            return compute()
        self._in_result = True
        result = self.run.result(self, metric, compute)
        self._in_result = False
        self.results += tf.nest.flatten(result)
        return result


_Tape = tf.GradientTape
_enter, _exit, _watch, _gradient = _Tape.__enter__, _Tape.__exit__, _Tape.watch, _Tape.gradient
_next = keras.random.SeedGenerator.next


@contextmanager
def patched_for_custom_step(model: keras.Model) -> Iterator[None]:
    """Returns a context to run custom steps of a model in."""
    with ExitStack() as stack:
        stack.enter_context(keras_optimizers.optimizers_in_scope(_apply, _cond))
        stack.enter_context(keras_losses.added_losses_in(_added_losses))
        methods = {
            "__enter__": _entered, "__exit__": _exited, "watch": _watched, "gradient": _gradients
        }  # fmt: skip
        stack.enter_context(all_replaced(_Tape, methods))
        stack.enter_context(replaced(keras.random.SeedGenerator, "next", _seed))
        stack.enter_context(replaced(tf, "cond", functools.partial(_cond_of_user, tf.cond)))
        stack.enter_context(functions_inlined())
        for metric in keras_model.metrics_of(model):
            plain = functools.partial(type(metric).result, metric)
            stack.enter_context(
                replaced(metric, "result", functools.partial(_result, metric, plain))
            )
        yield


def _added_losses() -> list[tuple[keras.Layer, Any]] | None:
    scope = CustomStepScope.current()
    return None if scope is None else scope.added_losses


def _entered(tape: tf.GradientTape) -> tf.GradientTape:
    _enter(tape)
    if scope := CustomStepScope.current():
        scope.opened(tape)
    return tape


def _exited(tape: tf.GradientTape, *exception: Any) -> None:
    if scope := CustomStepScope.current():
        scope.closed(tape)
    _exit(tape, *exception)


def _watched(tape: tf.GradientTape, tensors: Any) -> None:
    if CustomStepScope.current():
        tensors = [
            t.value if isinstance(t, keras.Variable) else t for t in tf.nest.flatten(tensors)
        ]
    _watch(tape, tensors)


def _gradients(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
    scope, flat = CustomStepScope.current(), tf.nest.flatten(sources)
    variables = [i for i, source in enumerate(flat) if isinstance(source, keras.Variable)]
    if scope is None or not variables:
        return _gradient(tape, target, sources, *args, **options)
    values = [scope.watched(tape, s) if i in variables else [s] for i, s in enumerate(flat)]
    others: dict[int, Any] = {}

    def compute(factor: tf.Tensor | None = None) -> list:
        if factor is not None:
            options["output_gradients"] = tf.nest.map_structure(
                lambda t: tf.ones_like(t) * tf.cast(factor, t.dtype), target
            )
        sums = [_sum(each) for each in _gradient(tape, target, values, *args, **options)]
        others.update(enumerate(sums))
        for i, gradient in others.items():  # those of tensors keep the scale of this run's rows
            if not (i in variables or gradient is None or factor is None):
                others[i] = tf.math.divide_no_nan(gradient, tf.cast(factor, gradient.dtype))
        return [sums[i] for i in variables]

    is_multiplied = bool(args) or options.get("output_gradients") is not None
    targets = None if is_multiplied else tf.nest.flatten(target)
    computed = scope.run.gradients(compute, scope.is_inside(tape), targets)
    gradients = others | dict(zip(variables, computed, strict=True))
    return tf.nest.pack_sequence_as(sources, [gradients[i] for i in range(len(flat))])


def _sum(gradients: Sequence[Any]) -> Any:
    """Returns the gradient of a variable: the sum of the gradients of all its values."""
    present = [g for g in gradients if g is not None]
    return present[0] if len(present) == 1 else tf.add_n(present) if present else None


def _seed(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    drawn, scope = _next(generator, ordered), CustomStepScope.current()
    return drawn if scope is None else scope.run.seed(drawn)


def _result(metric: keras.Metric, plain: Callable[[], Any]) -> Any:
    scope = CustomStepScope.current()
    return plain() if scope is None else scope.result(metric, plain)


def _apply(
    plain: Callable[..., None], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Replaces `Optimizer.apply`, also that of a `LossScaleOptimizer`."""
    scope = CustomStepScope.current()
    if scope is None:
        plain(optimizer, grads, trainable_variables)
    elif isinstance(optimizer, existing(keras.optimizers, "ScheduleFreeAdamW")):
        raise UnsupportedModelError(
            "ScheduleFreeAdamW is not supported in a custom train_step, because it reads a moment "
            "after changing it. Use another optimizer, or Keras's own train_step."
        )
    elif not optimizer.built:
        scope.unbuilt.append((optimizer, list(trainable_variables or ())))
    elif id(optimizer) in scope.scalings:
        # As in Keras, only the scale changes if the gradients overflow.
        scaling = scope.scalings[id(optimizer)]
        unscaled = scaling.unscale(list(grads))
        finite = scaling.overflows(dict(enumerate(unscaled))) == 0
        scope.either(
            finite,
            lambda: optimizer.inner_optimizer.apply(unscaled, trainable_variables),
            lambda: None,
        )
        with scope.optimizing():
            scaling.update(finite)
    else:
        with scope.optimizing():
            plain(optimizer, grads, trainable_variables)


def _cond_of_user(
    plain: Callable[..., Any],
    pred: Any,
    true_fn: Any = None,
    false_fn: Any = None,
    name: Any = None,
) -> Any:
    """Replaces `tf.cond`: where a branch assigns, both are computed, and one result is selected."""
    scope = CustomStepScope.current()
    if scope is None or true_fn is None or false_fn is None:
        return plain(pred, true_fn, false_fn, name)
    before = dict(scope.state_mapping)
    try:
        if tf.executing_eagerly():  # a trial sees what either branch changes
            return scope.either(pred, true_fn, false_fn)
        return plain(pred, true_fn, false_fn, name)
    except Exception as error:
        if not (tf.executing_eagerly() or isinstance(error, UnsupportedModelError)):
            raise
        scope.state_mapping.clear()
        scope.state_mapping.update(before)
        choose = plain if tf.executing_eagerly() else scope.either
        return choose(pred, true_fn, false_fn)


def _cond(plain: Callable[..., Any], condition: Any, when_true: Any, when_false: Any) -> Any:
    scope = CustomStepScope.current()
    choose = plain if scope is None or not scope.in_optimizer else scope.either
    return choose(condition, when_true, when_false)
