"""Private names of Keras's optimizers, and how they update sharded variables.

For a sharded variable, each function that replaces one of Keras's calls it once per shard, on the
shard's device. The result is the same where an optimizer computes each element by itself. Norms,
which clipping uses, are taken over all shards together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import ops
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.schedules import learning_rate_schedule

from tfdist.errors import UnsupportedModelError
from tfdist.upstream.keras_model import (
    check_same_attributes,
    flatten_layers,
    is_assigned,
    metrics_of,
    redefined,
)
from tfdist.upstream.keras_variables import ShardedGradient, ShardedVariable, part, values_of
from tfdist.upstream.optimizer_kernels import update_function
from tfdist.upstream.patching import all_replaced, replace, replaced
from tfdist.upstream.tensorflow_runtime import variables_assigned_by

_AVERAGES = "_model_variables_moving_average"
_plain_key = TFOptimizer.__dict__["_var_key"]
_plain_clip = BaseOptimizer.__dict__["_clip_gradients"]

#: Methods that `TFOptimizer` overrides for `tf.distribute`.
_FOR_DISTRIBUTION = (
    "_backend_update_step",
    "_apply_weight_decay",
    "_overwrite_model_variables_with_average_value",
    "_backend_increment_gradient_accumulators",
)


def new_like(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns a new optimizer with the same hyperparameters, and the same learning rate schedule.

    `get_config` serializes a schedule by `learning_rate_schedule.serialize`. A custom one has no
    config, or is not registered.
    """
    kind = type(optimizer).__name__
    try:
        with replaced(learning_rate_schedule, "serialize", lambda schedule: schedule):
            config = optimizer.get_config()
        created = type(optimizer).from_config(config)
        for old, new in {optimizer: created, unwrapped(optimizer): unwrapped(created)}.items():
            check_same_attributes(old, new)
        return created
    except Exception as error:  # whatever the user's class raises
        raise UnsupportedModelError(
            f"{kind} cannot be created again from its get_config ({error}). Define "
            f"{kind}.get_config, or pass the function that builds and compiles the model instead "
            "of the model."
        ) from error


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside a `LossScaleOptimizer`; any other optimizer as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def num_batches_seen(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Returns the number of batches that an accumulating optimizer has processed: `_iterations`.

    `iterations` counts updates instead.
    """
    return tf.convert_to_tensor(optimizer._iterations)


def build_as_fit_does(model: keras.Model) -> None:
    """Creates the variables of a built model's optimizer as `fit` on one device does.

    Unless the model runs eagerly, `fit` does so in a graph that it discards, so values that `build`
    assigns to variables are lost: ScheduleFreeAdamW's momentum starts at zero.
    """
    with ExitStack() as stack:
        stack.enter_context(knowing_shards())
        if not model.run_eagerly:
            stack.enter_context(variables_assigned_by(lambda *_, **__: None))
        model.optimizer.build(model.trainable_variables)


def knowing_shards() -> AbstractContextManager[None]:
    """A context in which an optimizer can be built for variables that are stored only in shards."""
    # TensorFlow's `assign` asks for the `tf.Variable` with the full value.
    return all_replaced(TFOptimizer, {"_var_key": _key, "assign": BaseOptimizer.assign})


def is_of_keras(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer does what Keras's own class of that name does."""
    is_changed = any(is_assigned(optimizer, name) for name in dir(type(optimizer)))
    return type(optimizer).__module__.startswith(("keras.src.", "tfdist.")) and not is_changed


def custom_step_of(model: keras.Model, training: bool) -> str | None:
    """Returns what a model redefines so that a step is custom, such as `"MyModel.train_step"`.

    Keras's own steps also read properties of the model, scale its loss, and call the optimizer for
    each batch whose gradients it accumulates. A model that redefines these runs Keras's steps as
    custom ones.
    """
    if not training:
        return redefined(model, "test_step", "losses")
    cause = redefined(model, "train_step", "losses", "trainable_weights", "trainable_variables")
    if cause is not None or not model.compiled or model.optimizer is None:
        return cause
    optimizer = unwrapped(model.optimizer)
    names = ("apply_gradients", "apply") if optimizer.gradient_accumulation_steps else ()
    return redefined(model.optimizer, "scale_loss") or redefined(optimizer, "scale_loss", *names)


#: Members by which tfdist finds all variables, and which Keras's loops do not read.
_LISTS = ("variables", "metrics_variables")


def check_lists_of_variables(model: keras.Model) -> None:
    """Refuses a model with a part that redefines the list of its variables.

    Raises:
        UnsupportedModelError: There is one.
    """
    for owner in (*flatten_layers(model), *optimizers_of(model), *metrics_of(model)):
        if cause := redefined(owner, *(name for name in _LISTS if hasattr(type(owner), name))):
            raise UnsupportedModelError(
                f"{cause} is redefined, but tfdist needs the list of all variables. Give the new "
                "list another name."
            )


def variables_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of an optimizer, of its attributes, and of optimizers among these.

    Keras lists only what `add_variable` has created. A hyperparameter may be a variable, too.
    """
    variables, optimizers = list[keras.Variable](), [optimizer]
    for one in optimizers:
        attributes = [v for v in vars(one).values() if isinstance(v, _MAY_HOLD_VARIABLES)]
        held = keras.tree.flatten(attributes)
        new = [v for v in held if isinstance(v, keras.optimizers.Optimizer)]
        optimizers += [v for v in new if not any(v is other for other in optimizers)]
        weights = {id(v) for v in getattr(one, "_trainable_variables", ())}
        variables += [v for v in held if isinstance(v, keras.Variable) and id(v) not in weights]
    return list({id(v): v for v in [*optimizer.variables, *variables]}.values())


_MAY_HOLD_VARIABLES = keras.Variable, keras.optimizers.Optimizer, list, tuple, dict


@contextmanager
def on_slot_creation(function: Callable[[keras.Variable, keras.Variable], None]) -> Iterator[None]:
    """Calls `function(slot, weight)` for each slot variable that an optimizer creates.

    The call follows immediately, before the next variable is created; most Keras optimizers create
    all of them in one call of `build`.
    """
    plain = keras.optimizers.Optimizer.add_variable_from_reference

    def made(optimizer: Any, reference_variable: Any, *args: Any, **options: Any) -> Any:
        slot = plain(optimizer, reference_variable, *args, **options)
        function(slot, reference_variable)
        return slot

    with replaced(keras.optimizers.Optimizer, "add_variable_from_reference", made):
        yield


def optimizers_of_one_device(has_copies: bool = False) -> AbstractContextManager[None]:
    """Makes Keras optimizers update one replica's variables with gradients that are already summed.

    If other replicas or processes have copies of them, slices of a row are added in order.
    TensorFlow's `scatter_add` takes any order, so that copies would differ by rounding.

    Inside `Strategy.update` every assignment is local. The methods of `TFOptimizer` for
    `tf.distribute` (all-reduce, merge calls) are replaced by those of `BaseOptimizer`. Clipping,
    weight decay, EMA, constraints and counters are Keras's own, applied to each shard of sharded
    variables.
    """
    one_by_one = (
        "_update_model_variables_moving_average",
        "_overwrite_model_variables_with_average_value",
    )
    plain = {name: getattr(BaseOptimizer, name) for name in _FOR_DISTRIBUTION} | {
        "_var_key": _key,
        "_backend_apply_gradients": _apply_by_one_rate,
        "_clip_gradients": _clip,
        "_apply_weight_decay": _of_each(_decay),
        "_backend_update_step": _update_each,
        **{name: _of_each(getattr(BaseOptimizer, name)) for name in one_by_one},
    }
    if has_copies:
        plain |= {name: _in_order(name) for name in ("assign_add", "assign_sub")}
    # Patched on the class, because optimizers such as Nadam override these and call super().
    return all_replaced(TFOptimizer, plain)


def _in_order(name: str) -> Callable[..., None]:
    """Returns `TFOptimizer.assign_add` or `assign_sub` for which equal rows keep their order."""
    plain = getattr(TFOptimizer, name)

    def assign(optimizer: Any, variable: Any, value: Any) -> None:
        if not isinstance(value, tf.IndexedSlices):
            plain(optimizer, variable, value)
            return
        local = variable.value if isinstance(variable, keras.Variable) else variable
        scatter = getattr(local, name.replace("assign", "scatter_nd"))
        scatter(value.indices[:, None], tf.cast(value.values, local.dtype))

    return assign


@contextmanager
def optimizers_in_scope(apply: Callable[..., None], cond: Callable[..., Any]) -> Iterator[None]:
    """Makes Keras optimizers update the values of variables in a `keras.StatelessScope`.

    Keras has no `stateless_apply` for TensorFlow, because `TFOptimizer` assigns to the
    `tf.Variable` itself. Here the methods of `BaseOptimizer`, which assign to the Keras variable,
    replace its methods.

    Args:
        apply: Called with the Keras method that it replaces, the optimizer and the arguments.
        cond: Replaces `keras.src.ops.cond` likewise; its branches must not assign anything.
    """
    key_of = TFOptimizer._var_key

    def var_key(self: Any, variable: Any) -> Any:
        return key_of(self, variable._value if isinstance(variable, keras.Variable) else variable)

    def assign_add(self: Any, variable: keras.Variable, value: Any) -> None:
        variable.assign(variable + tf.cast(tf.convert_to_tensor(value), variable.dtype))

    def assign_sub(self: Any, variable: keras.Variable, value: Any) -> None:
        variable.assign(variable - tf.cast(tf.convert_to_tensor(value), variable.dtype))

    def assign(self: Any, variable: keras.Variable, value: Any) -> None:
        if isinstance(value, tf.IndexedSlices):
            rows, old = value.indices[:, None], tf.convert_to_tensor(variable.value)
            value = tf.tensor_scatter_nd_update(old, rows, tf.cast(value.values, old.dtype))
        variable.assign(value)

    methods = {
        "_var_key": var_key, "assign": assign, "assign_add": assign_add, "assign_sub": assign_sub
    }  # fmt: skip
    plain = {name: getattr(BaseOptimizer, name) for name in _FOR_DISTRIBUTION}
    with ExitStack() as stack:
        stack.enter_context(all_replaced(TFOptimizer, methods | plain))
        for owner in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):

            def method(self: Any, *args: Any, _plain: Any = owner.apply, **options: Any) -> None:
                apply(_plain, self, *args, **options)

            stack.enter_context(replaced(owner, "apply", method))
        stack.enter_context(replaced(ops, "cond", functools.partial(cond, ops.cond)))
        yield


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of a model: the compiled one first, then its other attributes.

    A model that trains its parts separately (a GAN) has several; `compile` knows only one.
    """
    values = [getattr(model, "optimizer", None)]  # none without a compilation
    for layer in flatten_layers(model):
        for value in vars(layer).values():
            several = value.values() if isinstance(value, dict) else value
            # Copied, because TensorFlow wraps named tuples in objects that cannot be concatenated.
            values += [*several] if isinstance(value, (list, tuple, dict)) else [value]
    unique = {id(v): v for v in values if isinstance(v, keras.optimizers.Optimizer)}
    inner = {id(getattr(v, "inner_optimizer", None)) for v in unique.values()}
    return [v for key, v in unique.items() if key not in inner]


def clip_after(optimizer: keras.optimizers.Optimizer, function: Callable[[list], list]) -> None:
    """Makes an optimizer clip `function(gradients)` permanently: its `_clip_gradients`.

    Keras calls this once per step, after accumulation, even if no clipping is configured.
    """

    def clip(gradients: list) -> list:
        return type(optimizer)._clip_gradients(optimizer, function(gradients))

    replace(optimizer, "_clip_gradients", clip)


def refuse_elsewhere(optimizer: keras.optimizers.Optimizer, why: str) -> None:
    """Makes an optimizer raise an error if it is used outside of `optimizers_of_one_device`.

    Args:
        optimizer: An optimizer of sharded variables, which Keras does not support.
        why: The message of the error.
    """

    def apply(*args: Any, **options: Any) -> Any:
        if TFOptimizer.__dict__["_backend_update_step"] is not _update_each:
            raise UnsupportedModelError(why)
        return type(optimizer).apply(optimizer, *args, **options)

    replace(optimizer, "apply", apply)


@contextmanager
def methods_of_class(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes an optimizer use the methods of its class within the block, without replacements."""
    replacements = {
        name: value
        for name, value in vars(optimizer).items()
        if getattr(value, "__module__", None) == __name__
    }
    for name in replacements:
        object.__delattr__(optimizer, name)
    try:
        yield
    finally:
        for name, value in replacements.items():
            replace(optimizer, name, value)


def velocities(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the momentum variables of SGD and RMSprop, which include the learning rate.

    RMSprop's are `_momentums`; those of SGD are public.
    """
    momentums = []
    if optimizer.built and isinstance(optimizer, keras.optimizers.SGD):
        momentums = optimizer.momentums
    elif optimizer.built and isinstance(optimizer, keras.optimizers.RMSprop):
        momentums = optimizer._momentums
    return [v for v in momentums if v is not None]


def weights_known_to(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the weights that an optimizer was built for: `_trainable_variables`."""
    return list(optimizer._trainable_variables)


def slots_of(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns the slot variables of a built optimizer, each with its weight.

    Every Keras optimizer has lists of slot variables in the order of
    `Optimizer._trainable_variables`, with `None` for a weight without one.
    """
    optimizer = unwrapped(optimizer)
    if not optimizer.built:
        return []
    weights = list(optimizer._trainable_variables)
    listed = {id(v) for v in optimizer.variables}
    # `Optimizer._variables`, the list of all variables, may happen to have the same length.
    named = ((n, value) for n, value in vars(optimizer).items() if n != "_variables")
    lists = [value for _, value in named if isinstance(value, (list, tuple))]
    return [
        (slot, weight)
        for slots in lists
        if len(slots) == len(weights)
        for slot, weight in zip(slots, weights, strict=True)
        if id(slot) in listed and slot is not weight
    ]


def leave_out_of_weight_decay(
    optimizer: keras.optimizers.Optimizer,
    copied: keras.optimizers.Optimizer,
    variables: list[tuple[keras.Variable, keras.Variable]],
) -> None:
    """Copies the settings of `exclude_from_weight_decay` from one optimizer to another.

    They are not part of the configuration: `_exclude_from_weight_decay` has keys of `_var_key`,
    `_exclude_from_weight_decay_pattern` has names.
    """
    optimizer = unwrapped(optimizer)
    copied = unwrapped(copied)
    keys: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    weights = [new for old, new in variables if optimizer._var_key(old) in keys]
    copied.exclude_from_weight_decay(weights, None if pattern is None else [pattern.pattern])


def learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """Returns the variable of a learning rate that can be set; None: a schedule decides it.

    `_learning_rate` of the optimizer, or of the one inside a `LossScaleOptimizer`, whose own is
    always 0. The public `learning_rate` is a number where a schedule decides.
    """
    rate = unwrapped(optimizer)._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


@contextmanager
def learning_rate_evaluated(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Evaluates the learning rate of the next update now and once: `_get_current_learning_rate`.

    With weight decay, Keras evaluates a schedule for each weight. A schedule often has a branch,
    and before a branch, the host waits for all that a GPU has to compute first. An optimizer that
    is not Keras's own may compute its learning rate from this one, or assign it while it applies
    gradients.
    """
    if not is_of_keras(optimizer):
        yield
        return
    rate = optimizer._get_current_learning_rate()
    rate = tf.convert_to_tensor(rate) if isinstance(rate, keras.Variable) else rate
    with replaced(optimizer, "_learning_rate", rate):
        yield


def decays(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Returns whether weight decay applies to a weight: `_use_weight_decay`.

    Keras passes the TensorFlow variable, whose name begins with those of the layers.
    """
    return optimizer._use_weight_decay(values_of(variable)[0])


def index_of(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns the index of a weight in an optimizer's lists: `_get_variable_index`."""
    return optimizer._get_variable_index(variable)


def _key(optimizer: Any, variable: Any) -> Any:
    """Replaces `_var_key`: shards have the key of the full variable."""
    in_parts = isinstance(variable, ShardedVariable)
    return _plain_key(optimizer, variable.parts[0] if in_parts else variable)


def _apply_by_one_rate(optimizer: Any, gradients: list, variables: list) -> None:
    """Replaces `_backend_apply_gradients`: evaluates the learning rate once.

    Also that of each optimizer inside a `MultiOptimizer`.
    """
    with learning_rate_evaluated(optimizer):
        BaseOptimizer._backend_apply_gradients(optimizer, gradients, variables)


def _decay(optimizer: Any, variables: list) -> None:
    """Replaces `_apply_weight_decay`: multiplies each weight once, by the product of both rates."""
    if optimizer.weight_decay is None:
        return

    @functools.cache
    def product(dtype: str) -> Any:
        rates = optimizer.weight_decay, optimizer.learning_rate
        return math.prod(ops.cast(rate, dtype) for rate in rates)

    for variable in variables:
        if decays(optimizer, variable):
            variable.assign(variable - variable * product(variable.dtype))


def _update_each(optimizer: Any, gradients: list, variables: list, learning_rate: Any) -> None:
    """Replaces `_backend_update_step`: updates each shard on its device, where its slots are."""
    update = update_function(optimizer)
    for gradient, variable in zip(gradients, variables, strict=True):
        if not isinstance(variable, ShardedVariable):
            with tf.device(variable.value.device):
                update(gradient, variable.value, learning_rate)
            continue
        pieces = gradient if isinstance(gradient, ShardedGradient) else variable.cut(gradient)
        for number, piece in enumerate(pieces):
            shard = variable.parts[number]
            with tf.device(shard.device), part(number):
                update(piece, shard, learning_rate)


def _of_each(plain: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls a Keras method on the shards of its list of variables."""

    @functools.wraps(plain)
    def call(optimizer: Any, variables: list) -> None:
        if not any(isinstance(variable, ShardedVariable) for variable in variables):
            plain(optimizer, variables)
            return
        averages = getattr(optimizer, _AVERAGES, None)
        for place, variable in enumerate(variables):
            with ExitStack() as stack:
                if averages is not None and len(averages) == len(variables):
                    average = [averages[place]]
                    stack.enter_context(replaced(optimizer, _AVERAGES, average))
                if not isinstance(variable, ShardedVariable):
                    plain(optimizer, [variable])
                    continue
                for number, piece in enumerate(variable.parts):
                    with tf.device(piece.device), part(number):
                        plain(optimizer, [variable])

    return call


def _clip(optimizer: Any, gradients: list) -> list:
    """Replaces `_clip_gradients`: uses the norms of full gradients, like Keras."""
    divided = [g for g in gradients if isinstance(g, ShardedGradient)]
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        norms = iter(_norms(optimizer, divided))
        return [
            _clipped(g, next(norms), optimizer.clipnorm)
            if isinstance(g, ShardedGradient)
            else _plain_clip(optimizer, [g])[0]
            for g in gradients
        ]
    limit = optimizer.global_clipnorm
    if limit and limit > 0:
        norm = global_norm(optimizer, gradients)
        # Not finite if the norm is not finite, as in Keras.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [_times(g, scale) for g in gradients]
    return [
        ShardedGradient(_plain_clip(optimizer, list(g)))
        if isinstance(g, ShardedGradient)
        else _plain_clip(optimizer, [g])[0]
        for g in gradients
    ]


def global_norm(optimizer: Any, gradients: list) -> tf.Tensor:
    """Returns the norm of all gradients together, in the dtype of the first, of full gradients."""
    present = [g for g in gradients if g is not None]
    halves = [_half_square(g) for g in present if not isinstance(g, ShardedGradient)]
    divided = [g for g in present if isinstance(g, ShardedGradient)]
    halves += [tf.square(norm) / 2 for norm in _norms(optimizer, divided)]
    total = tf.reduce_sum(tf.stack([tf.cast(half, halves[0].dtype) for half in halves]))
    return tf.sqrt(2 * total)


def _norms(optimizer: Any, gradients: list[ShardedGradient]) -> list[tf.Tensor]:
    """Returns the norms of gradients of which this process has shards, in one exchange."""
    if not gradients:
        return []
    halves = [tf.add_n([_half_square(piece) for piece in g]) for g in gradients]
    divided = (v for v in optimizer._trainable_variables if isinstance(v, ShardedVariable))
    return [tf.sqrt(2 * total) for total in next(divided).division.add_up(halves)]


def _clipped(gradient: ShardedGradient, norm: tf.Tensor, limit: float) -> ShardedGradient:
    """Returns the result of `tf.clip_by_norm` for a gradient; sparse gradients stay sparse."""
    factor = limit / tf.maximum(norm, limit)
    return ShardedGradient(
        tf.math.scalar_mul(tf.cast(factor, piece.dtype), piece) for piece in gradient
    )


def _half_square(gradient: Any) -> tf.Tensor:
    """Returns half of the sum of a gradient's squares, in one pass over it where possible."""
    if isinstance(gradient, tf.Tensor) and gradient.dtype in (tf.float32, tf.float64):
        return tf.nn.l2_loss(gradient)
    return ops.sum(ops.square(gradient)) / 2


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, ShardedGradient):
        return ShardedGradient(piece * tf.cast(factor, piece.dtype) for piece in gradient)
    return gradient * factor
