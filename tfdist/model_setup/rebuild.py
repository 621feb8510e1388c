"""Makes a model again from its configuration, with its weights and its compilation."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UnsupportedModelError
from tfdist.model_setup.mismatch import cause
from tfdist.upstream import keras_model


def rebuild(model: keras.Model) -> keras.Model:
    """Returns a model of the same configuration, weights and compilation, in the current scope.

    Raises:
        UnsupportedModelError: The class does not come back from its configuration.
    """
    try:
        if keras_model.is_functional(model):
            copied = _clone_uncompiled(model)
        else:
            copied = type(model).from_config(model.get_config())
        if type(copied) is not type(model):
            raise TypeError(f"a {type(copied).__name__} came back")
        if model.built:
            if not copied.built:
                copied.build_from_config(model.get_build_config())
            _copy(model.variables, copied.variables)
            copied.built = True  # Keras leaves it to the first call of a subclassed model
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be rebuilt from its configuration "
            f"({cause(error)}): pass a function that builds it instead of the model."
        ) from error
    if model.compiled:
        compile_like(model, copied)
    return copied


def _clone_uncompiled(model: keras.Model) -> keras.Model:
    """Clones layers alone: a custom loss need not be registered, since it is handed on as it is."""
    compiled, model.compiled = model.compiled, False
    try:
        return keras.models.clone_model(model)
    finally:
        model.compiled = compiled


def compile_like(model: keras.Model, copied: keras.Model) -> None:
    """Compiles a copy as its model was: new optimizer and metrics, for both hold variables."""

    def fresh(part: Any) -> Any:
        if isinstance(part, (keras.optimizers.Optimizer, keras.metrics.Metric)):
            return type(part).from_config(part.get_config())
        return part

    optimizer, config = model.optimizer, keras_model.compile_config(model).config
    copied.compile(**{name: keras.tree.map_structure(fresh, v) for name, v in config.items()})
    if optimizer is not None and optimizer.built and copied.built:
        copied.optimizer.build(copied.trainable_variables)
        _copy(optimizer.variables, copied.optimizer.variables)


def _copy(sources: list[keras.Variable], targets: list[keras.Variable]) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{len(targets)} variables came back of {len(sources)}")
    for source, target in zip(sources, targets, strict=True):
        target.assign(source.numpy())
