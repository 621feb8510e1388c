"""Rebuilds a model from its configuration, with its weights and its compilation."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import keras
import numpy as np

from tfdist.console import folders
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.upstream import keras_layers, keras_model, keras_optimizers


def rebuild(model: keras.Model) -> keras.Model:
    """Returns a model with the same configuration, weights, and compilation, in the current scope.

    Raises:
        UnsupportedModelError: The model cannot be rebuilt from its configuration.
    """
    try:
        if keras_model.is_functional(model):
            copied = _clone_uncompiled(model)
        else:
            copied = _from_config(model)
        if type(copied) is not type(model):
            raise TypeError(f"the result is a {type(copied).__name__}")
        for old, new in [(model, copied), *zip(model.layers, copied.layers, strict=True)]:
            if old.built and not new.built:  # a model may not be built although its layers are
                new.build_from_config(old.get_build_config())
        _copy(model.variables, copied.variables)
        layers = keras_model.flatten_layers(model), keras_model.flatten_layers(copied)
        for old, new in zip(*layers, strict=True):
            _copy_adapted_state(old, new)
            _copy_seeds(old, new)
            keras_layers.copy_remat(new, old)
            keras_model.check_same_attributes(old, new)
        copied.built = model.built  # Keras sets it in the first call of a subclassed model
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be rebuilt from its configuration "
            f"({_reason(error)}): pass a function that builds it instead of the model."
        ) from None  # the message has the cause, and Keras's traceback is long
    if model.compiled:
        compile_like(model, copied)
    return copied


def _reason(error: Exception) -> str:
    """Returns the first sentence of an error, without its final period."""
    words = " ".join(str(error).split()) or type(error).__name__
    return textwrap.shorten(re.split(r"\.(?= |$)", words)[0], 300, placeholder=" ...")


def _from_config(model: keras.Model) -> keras.Model:
    """Returns a new model of the same class.

    A class such as in Keras's guides takes neither `trainable` nor `dtype`, which Keras adds to
    each configuration. They are left out where they have their defaults, if the configuration has
    all arguments of the class.
    """
    config, kind = model.get_config(), type(model)
    parameters = inspect.signature(kind.__init__).parameters.values()
    names = {one.name for one in list(parameters)[1:]}
    is_plain = (
        all(one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in parameters)
        and kind.from_config.__func__ is keras.Model.from_config.__func__
    )
    is_usual = model.trainable and model.dtype_policy.name == keras.config.dtype_policy().name
    further = config.keys() - names
    if is_plain and is_usual and names <= config.keys() and further <= {"trainable", "dtype"}:
        return kind(**{name: config[name] for name in names})
    return kind.from_config(config)


def _clone_uncompiled(model: keras.Model) -> keras.Model:
    """Clones the layers without the compilation, so that a custom loss need not be registered."""
    compiled, model.compiled = model.compiled, False
    try:
        return keras.models.clone_model(model)
    finally:
        model.compiled = compiled


def compile_like(model: keras.Model, copied: keras.Model) -> None:
    """Compiles a copy like its model, with a new optimizer and new metrics, which hold variables.

    Raises:
        UnsupportedModelError: The class overrides `compile`.
    """
    if keras_model.overrides(model, "compile"):
        raise UnsupportedModelError(
            f"{type(model).__name__} overrides compile, whose arguments cannot be recovered. Pass "
            "a function that builds and compiles it instead of the model."
        )

    def fresh(part: Any) -> Any:
        if isinstance(part, keras.optimizers.Optimizer):
            return keras_optimizers.new_like(part)
        if isinstance(part, keras.metrics.Metric):
            return _new_metric(part)
        return part

    optimizer, config = model.optimizer, keras_model.compile_config(model).config
    copied.compile(**{name: keras.tree.map_structure(fresh, v) for name, v in config.items()})
    if optimizer is None:
        return
    variables = list(zip(model.variables, copied.variables, strict=True))
    keras_optimizers.leave_out_of_weight_decay(optimizer, copied.optimizer, variables)
    if optimizer.built and copied.built:
        _copy_state(optimizer, copied.optimizer, variables)


def _new_metric(metric: keras.metrics.Metric) -> keras.metrics.Metric:
    kind = type(metric).__name__
    try:
        created = type(metric).from_config(metric.get_config())
        keras_model.check_same_attributes(metric, created)
    except Exception as error:  # whatever the user's class raises
        raise UnsupportedModelError(
            f"The metric {kind} cannot be created again from its get_config ({_reason(error)}). "
            f"Define {kind}.get_config, or pass the function that builds and compiles the model "
            "instead of the model."
        ) from error
    return created


def _copy_state(
    optimizer: keras.optimizers.Optimizer,
    copied: keras.optimizers.Optimizer,
    variables: list[tuple[keras.Variable, keras.Variable]],
) -> None:
    """Copies the state of an optimizer, also for weights that were frozen later.

    Raises:
        ConfigurationError: It has state for weights of another model.
    """
    copies = {id(old): new for old, new in variables}
    weights = keras_optimizers.weights_known_to(optimizer)
    if any(id(weight) not in copies for weight in weights):
        raise ConfigurationError(
            "The model's optimizer was built for weights that the model does not have. Compile it "
            "with a new one."
        )
    copied.build([copies[id(weight)] for weight in weights])
    _copy(optimizer.variables, copied.variables)


def _copy_adapted_state(layer: keras.layers.Layer, copied: keras.layers.Layer) -> None:
    """Copies the state of a preprocessing layer after `adapt`, including non-variables."""
    if hasattr(layer, "adapt"):
        store: dict[str, Any] = {}
        layer.save_own_variables(store)
        copied.load_own_variables({name: np.asarray(value) for name, value in store.items()})
    if hasattr(layer, "save_assets"):  # a vocabulary
        with folders.temporary() as folder:
            layer.save_assets(folder)
            copied.load_assets(folder)


def _copy_seeds(layer: keras.layers.Layer, copied: keras.layers.Layer) -> None:
    """Copies the seeds of initializers, for weights that are created later.

    An initializer without a seed draws one when it is created, which its configuration omits.
    """
    for name, value in vars(layer).items():
        other = vars(copied).get(name)
        seed = getattr(value, "seed", None)
        if isinstance(value, keras.initializers.Initializer) and isinstance(seed, int):
            other.seed = seed


def _copy(sources: list[keras.Variable], targets: list[keras.Variable]) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"it has {len(targets)} variables instead of {len(sources)}")
    for source, target in zip(sources, targets, strict=True):
        target.assign(source.numpy())
