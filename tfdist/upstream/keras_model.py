"""Private names of Keras's models and layers."""

from __future__ import annotations

import functools
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.models.functional import (
    Functional,
    functional_like_constructor,
    unpack_singleton,
)
from keras.src.random import seed_generator
from keras.src.trainers import trainer

from tfdist.upstream.patching import replace, replaced

#: `seed_generator.GLOBAL_SEED_GENERATOR`, a constant that Keras 3.8 to 3.11 write out.
_GLOBAL_GENERATOR = "global_seed_generator"


def flatten_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns a model and all its layers, including nested ones: `Layer._flatten_layers`."""
    return list(model._flatten_layers())


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the seeds of the random layers of a model: `Layer._seed_generators`."""
    generators = (getattr(layer, "_seed_generators", []) for layer in flatten_layers(model))
    return [generator.state for of_layer in generators for generator in of_layer]


def recurrent_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of stateful recurrent layers, which are not among a model's variables."""
    layers = [one for one in flatten_layers(model) if getattr(one, "stateful", False)]
    states = keras.tree.flatten([getattr(layer, "states", None) for layer in layers])
    return [state for state in states if isinstance(state, keras.Variable)]


def drawing_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers with seeds, without recurrent layers and cells whose dropout is 0.

    Recurrent layers have a seed whether they use it or not; other layers have one only if they
    draw: `Layer._seed_generators`.
    """
    rates = ("dropout", "recurrent_dropout")
    return [
        layer
        for layer in flatten_layers(model)
        if getattr(layer, "_seed_generators", [])
        and not all(getattr(layer, rate, None) == 0 for rate in rates)
    ]


def is_seed(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a `SeedGenerator`, by its name and shape."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def global_generator() -> keras.random.SeedGenerator | None:
    """Returns the seed generator for random numbers without a seed; None if it does not exist yet.

    `global_state.get_global_attribute`, with the name that `seed_generator` has for it.
    Keras's getter would create it, which changes the seeds of layers that are created later.
    """
    return global_state.get_global_attribute(_GLOBAL_GENERATOR)


def ensured_global_generator() -> keras.random.SeedGenerator:
    """Returns the same; creates it if necessary: `seed_generator.global_seed_generator`."""
    return seed_generator.global_seed_generator()


#: When a global generator was seen first, on the clock that each saved state advances. A thread's
#: may come from another thread, so that it is not new because the thread did not have it before.
_first_seen = weakref.WeakKeyDictionary[keras.random.SeedGenerator, int]()
_clock = itertools.count()


def python_random_state() -> Callable[[], None]:
    """Returns a function that restores the state of `random`, from which Keras draws seeds.

    If the global generator has been created since, what its seed took stays taken, as without the
    trial or trace that is undone: `seed_generator.make_default_seed`.
    """

    def seen() -> int:
        generator = global_generator()
        return -1 if generator is None else _first_seen.setdefault(generator, next(_clock))

    seen()
    state, now = random.getstate(), next(_clock)

    def restore() -> None:
        random.setstate(state)
        if seen() > now:
            seed_generator.make_default_seed()

    return restore


def use_global_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Makes this thread use another thread's generator: `set_global_attribute`, one per thread."""
    global_state.set_global_attribute(_GLOBAL_GENERATOR, generator)


def call_model(model: keras.Model, x: Any, training: bool) -> Any:
    """Calls a model, with `training` if its `call` has the argument: `_call_has_training_arg`."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def overrides(model: keras.Model, name: str) -> bool:
    """Returns whether a model's class, or the model itself, overrides a member of `keras.Model`."""
    is_of_class = getattr(type(model), name) is not getattr(keras.Model, name)
    return is_of_class or is_assigned(model, name)


def redefined(owner: Any, *names: str) -> str | None:
    """Returns the first member that an object or its class defines, unlike Keras's class of it.

    Returns:
        Such as `"MyModel.train_step"`, or None.
    """
    kind = type(owner)
    base = next(cls for cls in kind.__mro__ if cls.__module__.startswith("keras."))
    for name in names:
        if is_assigned(owner, name) or getattr(kind, name) is not getattr(base, name):
            return f"{kind.__name__}.{name}"
    return None


def is_assigned(owner: Any, name: str) -> bool:
    """Returns whether user code has set a method as an attribute of an object, not of its class."""
    value = vars(owner).get(name)
    value = value.func if isinstance(value, functools.partial) else value
    return callable(value) and not str(getattr(value, "__module__", "")).startswith("tfdist.")


def check_same_attributes(source: Any, copied: Any) -> None:
    """Checks that a copy from a configuration has what user code has set on the original.

    A method that is set on the object is not part of a configuration, nor are arguments of a
    subclass without a `get_config` of its own. `Layer.__new__` itself sets `build` and `quantize`,
    and `compile` sets `loss`.

    Raises:
        TypeError: It lacks something.
    """
    attributes, others = vars(source), vars(copied)
    listed = {id(v) for v in getattr(source, "variables", ())}
    is_layer = isinstance(source, keras.layers.Layer)
    for name, value in attributes.items():
        if hasattr(type(source), name):
            is_lost = is_assigned(source, name) and name not in ("build", "quantize", "loss")
        elif is_layer or name.startswith("_"):
            is_lost = False
        elif isinstance(value, keras.Variable):
            is_lost = id(value) not in listed and not isinstance(others.get(name), keras.Variable)
        else:
            is_plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
            is_lost = is_plain and others.get(name) != value
        if is_lost:
            raise TypeError(f"{type(source).__name__}.{name} would be lost")


@contextmanager
def plain_function(model: keras.Model, loop: str, in_xla: bool) -> Iterator[Callable[..., Any]]:
    """Returns a context with the function that Keras's `fit` would call for each batch.

    `make_train_function`, `make_test_function` or `make_predict_function` creates it. Replaces
    `_run_eagerly` and `_jit_compile`, the values of the public properties.

    Args:
        model: A built model.
        loop: `"train"`, `"test"` or `"predict"`.
        in_xla: Whether XLA compiles it; otherwise it runs eagerly.
    """
    attributes = vars(model)
    names = ("_run_eagerly", "_jit_compile", f"{loop}_function")
    before = {name: attributes[name] for name in names}
    attributes |= {"_run_eagerly": not in_xla, "_jit_compile": in_xla, f"{loop}_function": None}
    try:
        getattr(model, f"make_{loop}_function")(force=True)
        yield attributes[f"{loop}_function"]
    finally:
        attributes |= before


def compile_config(model: keras.Model) -> Any:
    """Returns the arguments of `compile`, a new object per call of it, or None before the first.

    `Trainer._compile_config`. Its `config` has the objects that were passed; the public
    `get_compile_config` serializes them.
    """
    return getattr(model, "_compile_config", None)


def mask_of(tensor: Any) -> Any:
    """Returns the mask that a layer attached to its output, or None: `backend.get_keras_mask`."""
    return backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor: `backend.set_keras_mask`."""
    backend.set_keras_mask(tensor, mask)


def logits_of(tensor: Any) -> Any:
    """Returns the input of a softmax or sigmoid, or None: `_keras_logits` of its result.

    Keras's losses compute cross entropies from these logits, not from the probabilities.
    """
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Attaches logits to probabilities: `_keras_logits`."""
    tensor._keras_logits = logits


def moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance as the layer's class computes them: its `_moments`."""
    return type(layer)._moments(layer, inputs, mask)


def moments_computed_by(
    layer: keras.layers.BatchNormalization, function: Callable[..., Any]
) -> Any:
    """Returns a context in which `function(inputs, mask)` computes the layer's moments."""
    return replaced(layer, "_moments", function)


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int] | None:
    """Returns the axes of the moments: `BatchNormalization._reduction_axes`; None if not built."""
    return layer._reduction_axes


def called_by(layer: keras.layers.Layer, function: Callable[..., Any]) -> Any:
    """Returns a context in which `function` replaces the layer's `call`."""
    return replaced(layer, "call", function)


def signs_on_device() -> Any:
    """Returns a context in which `keras.src.backend.numpy.signbit` computes where its input is.

    `argmax` calls it, thus each accuracy, and it compares int32, which GPUs leave to the host: in
    each step all logits would be copied there.
    """
    if not hasattr(backend.numpy, "signbit"):  # Keras 3.8, whose argmax compares no signs
        return nullcontext()
    plain = backend.numpy.signbit

    def signbit(x: Any) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        if not x.dtype.is_floating:
            return plain(x)
        bits = tf.bitcast(tf.cast(x, tf.float32), tf.int32)
        return tf.cast(tf.bitwise.bitwise_and(bits, tf.int32.min), tf.float32) < 0

    return replaced(backend.numpy, "signbit", signbit)


def take_replaced_by(function: Callable[..., Any]) -> Any:
    """Returns a context in which `function(take, x, indices, axis)` replaces `keras.ops.take`.

    `take` is the original `keras.src.backend.numpy.take`. `keras.layers.Embedding` calls it
    directly, and has no method for it that could be overridden.
    """
    return replaced(backend.numpy, "take", functools.partial(function, backend.numpy.take))


def variable_of(variable: keras.Variable) -> tf.Variable | None:
    """Returns the `tf.Variable` of a weight, in `Variable._value`; None if it is sharded."""
    return vars(variable).get("_value")


def rows_of(variable: keras.Variable, rows: tf.Tensor) -> tf.Tensor:
    """Returns rows of a variable, autocast, without reading the others.

    Uses `Variable._value` and `Variable._maybe_autocast`, because the public `value` reads all.
    """
    return variable._maybe_autocast(tf.gather(variable._value, rows))


def move(variable: keras.Variable, device: str) -> None:
    """Moves a variable to another device, with its value. References to it stay valid.

    Replaces the `tf.Variable` in `Variable._value`. Its `_unique_id`, by which optimizers find the
    slot variables of a weight, stays the same.
    """
    old = vars(variable)["_value"]
    if tf.DeviceSpec.from_string(old.device).to_string().endswith(device):
        return
    with tf.init_scope(), tf.device(device):
        new = tf.Variable(
            old.read_value(),
            trainable=old.trainable,
            name=plain_name(old),
            aggregation=old.aggregation,
        )
    new._unique_id = old._unique_id
    vars(variable)["_value"] = new


def plain_name(variable: tf.Variable) -> str:
    """Returns the name to create a copy of a TensorFlow variable with, by which users choose it."""
    return variable.name.removesuffix(":0")


def values_chosen_by(choose: Callable[[Any], Any]) -> Any:
    """Returns a context in which `choose(value)` replaces the value of every `keras.Variable`.

    A property replaces `Variable._value`, which the public `value`, assignments, and conversions to
    tensors all use.
    """

    def chosen(variable: keras.Variable) -> Any:
        value = vars(variable)["_value"]
        return value if value is None else choose(value)

    def keep(variable: keras.Variable, value: Any) -> None:
        vars(variable)["_value"] = value

    return replaced(keras.Variable, "_value", property(chosen, keep))


def value_in_scope(variable: keras.Variable) -> tf.Tensor | None:
    """Returns the value of a variable in the current `keras.StatelessScope`; None if it has none.

    Uses `backend.in_stateless_scope` and `get_stateless_scope`: no public function returns the
    current scope.
    """
    if not backend.in_stateless_scope():
        return None
    return backend.get_stateless_scope().get_current_value(variable)


def stateless_scope() -> keras.StatelessScope | None:
    """Returns the `keras.StatelessScope` that this thread is in: `backend.get_stateless_scope`."""
    return backend.get_stateless_scope()


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Returns all metrics of a model and its layers once each, including compiled ones one by one.

    `Layer._metrics` and `_compile_metrics`, because overrides of `metrics` may omit some.
    """
    metrics = [*model.metrics, *(m for layer in flatten_layers(model) for m in layer._metrics)]
    metrics.append(getattr(model, "_compile_metrics", None))
    metrics += [inner for metric in metrics for inner in getattr(metric, "metrics", ())]
    return list({id(m): m for m in metrics if isinstance(m, keras.Metric)}.values())


def metrics_variables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the state of a model's metrics, also of those that an override of `metrics` omits."""
    if redefined(model, "metrics") is None:
        return model.metrics_variables
    variables = [v for metric in metrics_of(model) for v in metric.variables]
    return list({id(v): v for v in variables}.values())


def compute_moments_by(
    layer: keras.layers.BatchNormalization, function: Callable[..., Any]
) -> None:
    """Makes `function(inputs, mask)` compute a layer's moments permanently: its `_moments`."""
    replace(layer, "_moments", function)


def refuse_xla(is_refused: Callable[[keras.Model], bool]) -> None:
    """Excludes models from XLA permanently: `trainers.trainer.model_supports_jit`.

    `compile` calls it to decide whether `jit_compile="auto"` uses XLA; a model cannot override it.
    """
    supports = trainer.model_supports_jit
    replace(trainer, "model_supports_jit", lambda model: supports(model) and not is_refused(model))


def use_xla_by_default_if(is_allowed: Callable[[keras.Model], bool]) -> Any:
    """Returns a context in which `jit_compile="auto"` is XLA only for the models that are allowed.

    Whether there is a GPU and the model supports XLA is decided by Keras.
    """
    plain = keras.Model._resolve_auto_jit_compile
    return replaced(
        keras.Model,
        "_resolve_auto_jit_compile",
        lambda model: is_allowed(model) and plain(model),
    )


def keep_xla_by_default_if(model: keras.Model, is_allowed: Callable[[keras.Model], bool]) -> None:
    """Applies `use_xla_by_default_if` to a model permanently, for later calls of `compile`."""
    plain = type(model)._resolve_auto_jit_compile
    replace(model, "_resolve_auto_jit_compile", lambda: is_allowed(model) and plain(model))


def use_xla_by_default(model: keras.Model) -> None:
    """Undoes `keep_xla_by_default_if`."""
    vars(model).pop("_resolve_auto_jit_compile", None)


def without_default_xla(model: keras.Model, active: bool) -> Any:
    """Returns a context in which a model uses XLA only if it was compiled with `jit_compile=True`.

    For a model that `compile` has already given `_jit_compile=True` because of `"auto"`.
    """
    if not active or not model.compiled or compile_config(model).config["jit_compile"] != "auto":
        return nullcontext()
    return replaced(model, "_jit_compile", False)


def build_by_shapes(model: keras.Model, x: Any) -> Any:
    """Calls a model on `keras.KerasTensor`s, which creates its weights without computing anything.

    `keras.src.backend.compute_output_spec`, which Keras calls before training. Calling the model
    itself would add a node to its graph.

    Returns:
        The outputs, as `keras.KerasTensor`s.
    """
    return backend.compute_output_spec(model, x, training=False)


def build_for_training(model: keras.Model, batch: Any) -> None:
    """Creates the variables of metrics, loss and optimizer from the `tf.TensorSpec`s of a batch.

    `model._symbolic_build`, which `keras.Model.fit` calls with its first batch. It traces the whole
    model for the shapes of its outputs, which takes a seventh of the first step of ResNet-50. This
    is skipped where the model declares them.
    """
    trace, graph = backend.compute_output_spec, functional_graph(model)

    def compute_output_spec(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function is model and graph is not None:
            # As `Functional.call` does, in contrast to `Functional.compute_output_spec`.
            return unpack_singleton(graph.compute_output_spec(graph.input))
        return trace(function, *args, **kwargs)

    with ExitStack() as stack:
        if graph is not None and _declares_outputs(graph, batch[0]):
            replacement = replaced(backend, "compute_output_spec", compute_output_spec)
            stack.enter_context(replacement)
        model._symbolic_build(data_batch=batch)


def build_eagerly(model: keras.Model, batch: tuple[Any, Any, Any]) -> None:
    """Creates the variables of metrics and loss by a call whose results are dropped.

    For functions that read values, which shapes do not have: `model._compute_loss`.
    """
    x, y, sample_weight = batch
    with keras.StatelessScope():
        y_pred = call_model(model, x, training=False)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        model._compute_loss(x, y, y_pred, sample_weight, training=False)


def _declares_outputs(graph: Functional, x: Any) -> bool:
    """Tells whether a call with `tf.TensorSpec`s would return outputs as the model declares them.

    A functional model keeps the outputs that it was created with. They apply if the inputs have the
    declared shapes, and no layer declares an output shape itself, which may be wrong.
    """
    if not all(layer.built and _infers_output_shape(layer) for layer in flatten_layers(graph)):
        return False
    specs, inputs = keras.tree.flatten(x), keras.tree.flatten(graph.input)
    one, other = (keras.tree.map_structure(lambda _: 0, nest) for nest in (x, graph.input))
    if len(specs) > 1 and one != other:
        return False
    return len(specs) == len(inputs) and all(
        spec.dtype.name == declared.dtype
        and spec.shape[1:] == declared.shape[1:]
        and declared.shape[0] in (None, spec.shape[0])
        for spec, declared in zip(specs, inputs, strict=True)
    )


def _infers_output_shape(layer: keras.layers.Layer) -> bool:
    if type(layer).__module__.startswith("keras."):
        return not isinstance(layer, keras.layers.Lambda)
    methods = ("compute_output_shape", "compute_output_spec")
    bases = (keras.layers.Layer, Functional, keras.Sequential)
    return all(
        getattr(type(layer), name) in [getattr(base, name) for base in bases] for name in methods
    )


def functional_graph(model: keras.Model) -> Functional | None:
    """Returns the functional model that computes a model's outputs.

    A `Sequential` has one in `_functional`, once it is built.

    Returns:
        None for a subclassed model, or if the model is not built.
    """
    graph = model
    if isinstance(model, keras.Sequential):
        if type(model).call is not keras.Sequential.call or is_assigned(model, "call"):
            return None
        graph = model._functional
    is_plain = isinstance(graph, Functional) and type(graph).call is Functional.call
    return graph if is_plain and not is_assigned(graph, "call") else None


def can_be_cloned(model: keras.Model) -> bool:
    """Returns whether `keras.models.clone_model` returns a model of the same class.

    It does not if a class creates its own inputs and outputs: `functional_like_constructor`.
    """
    return is_functional(model) and (
        isinstance(model, keras.Sequential) or functional_like_constructor(type(model))
    )


def is_functional(model: keras.layers.Layer) -> bool:
    """Returns whether Keras knows the graph of a model's layers, and therefore can clone it.

    Checks the attribute `_operations`: functional and subclassed models are both `keras.Model`s.
    """
    return isinstance(model, keras.Sequential) or hasattr(model, "_operations")
