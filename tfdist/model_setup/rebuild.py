"""Rebuilds a model from its configuration, with its weights and its compilation."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfdist import precision
from tfdist.console import folders
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.upstream import keras_layers, keras_model, keras_optimizers


def rebuild(model: keras.Model) -> keras.Model:
    """Returns a model with the same configuration, weights, and compilation, in the current scope.

    Raises:
        UnsupportedModelError: The model cannot be rebuilt from its configuration.
    """
    try:
        if keras_model.can_be_cloned(model):
            # Without the compilation, so that a custom loss need not be registered.
            compiled, model.compiled = model.compiled, False
            try:
                copied = keras.models.clone_model(model)
            finally:
                model.compiled = compiled
        else:
            copied = _from_config(model)
            if keras_layers.first_of_other_dtype(model, copied) is not None:
                # A quantized backbone of KerasHub omits the dtype of its other layers.
                with precision.policy(model.dtype_policy.name):
                    copied = _from_config(model)
        if other := keras_layers.first_of_other_dtype(model, copied):
            raise TypeError(f"{other[0].path} would compute in {other[1]}")
        if type(copied) is not type(model):
            raise TypeError(f"the result is a {type(copied).__name__}")
        for old, new in [(model, copied), *zip(model.layers, copied.layers, strict=True)]:
            if old.built and not new.built:  # a model may not be built although its layers are
                new.build_from_config(old.get_build_config())
        layers = keras_model.flatten_layers(model), keras_model.flatten_layers(copied)
        for old, new in zip(*layers, strict=True):
            if old is not new:
                keras_layers.copy_changes(old, new)
        for old, new in _paired_variables(model, copied):
            new.assign(old.numpy())
            new.trainable = old.trainable
        for old, new in zip(*layers, strict=True):
            if hasattr(old, "adapt"):  # a preprocessing layer, whose state is not all in variables
                store: dict[str, Any] = {}
                old.save_own_variables(store)
                new.load_own_variables({name: np.asarray(value) for name, value in store.items()})
            if hasattr(old, "save_assets") and old is not new:  # a vocabulary
                with folders.temporary() as folder:
                    old.save_assets(folder)
                    new.load_assets(folder)
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
    try:
        # Two tokenizers of tensorflow-text with equal vocabularies have one resource, and both lose
        # it as soon as one of them is deleted.
        parts = {name: getattr(model, name, None) for name in config}
        shared = {
            name: part
            for name, part in parts.items()
            if isinstance(part, keras.layers.Layer)
            and not part.variables
            and any(hasattr(layer, "save_assets") for layer in keras_model.flatten_layers(part))
        }
        return kind.from_config(config | shared)
    except Exception:  # of a class that expects configurations only
        return kind.from_config(config)


def compile_like(model: keras.Model, copied: keras.Model) -> None:
    """Compiles a copy like its model, with a new optimizer and new metrics, which hold variables.

    Raises:
        UnsupportedModelError: The class overrides `compile`, and its arguments are not known.
    """

    def fresh(part: Any) -> Any:
        if isinstance(part, keras.optimizers.Optimizer):
            return keras_optimizers.new_like(part)
        if isinstance(part, keras.metrics.Metric):
            kind = type(part).__name__
            try:
                created = type(part).from_config(part.get_config())
                keras_model.check_same_attributes(part, created)
            except Exception as error:  # whatever the user's class raises
                raise UnsupportedModelError(
                    f"The metric {kind} cannot be created again from its get_config "
                    f"({_reason(error)}). Define {kind}.get_config, or pass the function that "
                    "builds and compiles the model instead of the model."
                ) from error
            return created
        return part

    optimizer, config = model.optimizer, keras_model.compile_config(model).config
    if keras_model.overrides(model, "compile"):
        _compile_by_override(model, copied, fresh)
    else:
        copied.compile(**{n: keras.tree.map_structure(fresh, v) for n, v in config.items()})
    if optimizer is None:
        return
    variables = _paired_variables(model, copied)
    keras_optimizers.leave_out_of_weight_decay(optimizer, copied.optimizer, variables)
    if optimizer.built and copied.built:
        # The state of the optimizer, also for weights that were frozen later.
        copies = {id(old): new for old, new in variables}
        weights = keras_optimizers.weights_known_to(optimizer)
        if any(id(weight) not in copies for weight in weights):
            raise ConfigurationError(
                "The model's optimizer was built for weights that the model does not have. Compile "
                "it with a new one."
            )
        copied.optimizer.build([copies[id(weight)] for weight in weights])
        for old, new in zip(optimizer.variables, copied.optimizer.variables, strict=True):
            new.assign(old.numpy())


def _compile_by_override(
    model: keras.Model, copied: keras.Model, fresh: Callable[[Any], Any]
) -> None:
    """Calls the `compile` of a class.

    Keras keeps its own arguments. Those that an override adds are the model's attributes of the
    same name, as in KerasHub and in the guides of Keras.

    Raises:
        UnsupportedModelError: An argument is not known, or the copy is compiled differently.
    """

    def arguments(of: keras.Model) -> dict[str, Any]:
        config = keras_model.compile_config(of).config
        attributes = {name: vars(of)[name] for name in names if name in vars(of)}
        return attributes | config

    def unknown(name: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(model).__name__} overrides compile, whose argument {name!r} cannot be "
            f"recovered. Keep it as self.{name}, or pass a function that builds and compiles it "
            "instead of the model."
        )

    parameters = inspect.signature(model.compile).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    before = arguments(model)
    if missing := [name for name in names if name not in before]:
        raise unknown(missing[0])
    passed = {name: keras.tree.map_structure(fresh, value) for name, value in before.items()}
    named = {name: passed[name] for name in names}
    try:
        copied.compile(**passed)
    except TypeError:  # it takes no others, or passes them itself
        copied.compile(**named)
    after = arguments(copied)
    for name, value in before.items():
        pairs = keras.tree.flatten(value), keras.tree.flatten(after[name])
        if len(pairs[0]) != len(pairs[1]) or not all(map(_is_alike, *pairs)):
            raise unknown(name)


def _is_alike(one: Any, other: Any) -> bool:
    """Returns whether parts of a compilation have the same type, and the same settings."""
    if type(one) is not type(other) or not hasattr(one, "get_config"):
        return one is other or (type(one) is type(other) and one == other)
    configs = [part.get_config() | {"name": None} for part in (one, other)]
    return configs[0] == configs[1]


def _copy_seeds(layer: keras.layers.Layer, copied: keras.layers.Layer) -> None:
    """Copies the seeds of initializers, for weights that are created later.

    An initializer without a seed draws one when it is created, which its configuration omits.
    """
    for name, value in vars(layer).items():
        other = vars(copied).get(name)
        seed = getattr(value, "seed", None)
        if isinstance(value, keras.initializers.Initializer) and isinstance(seed, int):
            other.seed = seed


def _paired_variables(
    model: keras.Model, copied: keras.Model
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns each variable of a model with that of its copy.

    A layer that was quantized has its variables in another order than one that is created so.
    """
    pairs: dict[int, tuple[keras.Variable, keras.Variable]] = {}
    layers = keras_model.flatten_layers(model), keras_model.flatten_layers(copied)
    for layer in zip(*layers, strict=True):
        old, new = map(keras_layers.variables_by_name, layer)
        if old.keys() == new.keys():
            pairs |= {id(old[name]): (old[name], new[name]) for name in old}
        else:  # Keras has numbered variables without a name
            in_order = zip(old.values(), new.values(), strict=True)
            pairs |= {id(one): (one, other) for one, other in in_order}
    if lost := [v.path for v in model.variables if id(v) not in pairs]:
        raise ValueError(f"{lost[0]} would be lost")
    return list(pairs.values())
