"""Activation checkpointing: the layers of a model that are called through `keras.remat`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import keras

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.patches.rematerialized import rematerialized
from tfdist.upstream import keras_layers
from tfdist.upstream.features import HAS_REMAT
from tfdist.upstream.keras_model import (
    flatten_layers,
    is_functional,
)

#: Layers of Keras, with their activation, that keep no more for the backward pass than their inputs
#: and outputs, as their neighbors do: remat gains nothing. With it, a `ReLU` keeps its input too.
_CHEAP = re.compile(
    r"InputLayer|Flatten|Reshape|Permute|RepeatVector|Identity|(Leaky)?ReLU|ELU|Softmax|"
    r"Concatenate|Add|Subtract|Multiply|Average|Maximum|Minimum|"
    r"(Cropping|UpSampling|ZeroPadding|(Global)?(Average|Max)Pooling)\dD|"
    r"((Depthwise)?Conv\dD(Transpose)?|(Einsum)?Dense|Activation)"
    r"( linear| relu6?| s?elu| sigmoid| tanh| softmax)?"
)


def check(remat: str) -> None:
    """Checks the argument `remat` of a `Trainer`.

    Args:
        remat: `"none"`, `"all"`, or a regular expression.

    Raises:
        ConfigurationError: It is none of these, or Keras has no `remat`.
    """
    if remat != "none" and not HAS_REMAT:
        raise ConfigurationError(
            f"remat={remat!r}: Keras {keras.version()} has no keras.remat. Upgrade to Keras 3.9."
        )
    try:
        re.compile(remat)
    except (re.error, TypeError) as error:
        raise ConfigurationError(
            f"remat={remat!r}: expected 'none', 'all', or a regular expression that finds names of "
            f"layers ({error})."
        ) from error


def exact_remat() -> AbstractContextManager[None]:
    """Returns a context in which `keras.remat` is `rematerialized`."""
    return keras_layers.remat_replaced_by(rematerialized)


def chosen(model: keras.Model, remat: str) -> list[keras.layers.Layer]:
    """Returns the layers of a model to rematerialize, each as a whole.

    Where one of them contains another, the outer one. Of a model inside of a model, its layers.

    Args:
        model: A built model.
        remat: As `check` takes it; searched for in names like `"encoder/block_1/dense"`.

    Raises:
        ConfigurationError: No layer has such a name.
    """
    if remat == "none":
        return []
    named = dict(_named(model, ""))
    layers, inside = [], set[int]()
    for path, layer in named.items():
        if is_functional(layer) or id(layer) in inside:
            continue
        is_chosen = not _is_cheap(layer) if remat == "all" else re.search(remat, path)
        if is_chosen:
            layers.append(layer)
            inside |= {id(inner) for inner in flatten_layers(layer)}
    if not layers and remat != "all":
        raise ConfigurationError(
            f"remat={remat!r} matches none of the layers {', '.join(list(named)[:8])}."
        )
    return layers


def described(model: keras.Model, remat: str) -> str:
    """Returns `remat` with the number of layers that it chooses."""
    return remat if remat == "none" else f"{remat}: {len(chosen(model, remat))} layers"


@contextmanager
def layers_rematerialized(model: keras.Model, remat: str, sync_batch_norm: bool) -> Iterator[None]:
    """Returns a context to trace a step in, in which layers are called through `keras.remat`.

    These are the layers that `remat` names, and those that were made in a `keras.RematScope`.

    Raises:
        UnsupportedModelError: One of the layers sums over replicas.
    """
    with ExitStack() as stack:
        stack.enter_context(exact_remat())
        named = chosen(model, remat)
        for layer in named:
            stack.enter_context(keras_layers.remat_enabled(layer))
        marked = [layer for layer in flatten_layers(model) if keras_layers.is_in_remat_scope(layer)]
        for layer in [*named, *marked]:
            for inner in flatten_layers(layer):
                is_norm = isinstance(inner, keras.layers.BatchNormalization)
                if is_norm and inner is not layer and (sync_batch_norm or inner.synchronized):
                    raise UnsupportedModelError(
                        f"{layer.name!r} cannot be rematerialized: {inner.name!r} in it sums "
                        "moments over all replicas. Exclude it from remat=, or do not use "
                        "sync_batch_norm."
                    )
        for layer in marked:
            if layer is model or _is_cheap(layer) or _has_marked_layers(layer, marked):
                stack.enter_context(keras_layers.remat_enabled(layer, does=False))
        yield


def _is_cheap(layer: keras.layers.Layer) -> bool:
    name, activation = type(layer).__name__, getattr(layer, "activation", None)
    if isinstance(layer, (keras.layers.BatchNormalization, keras.layers.Embedding)):
        return True
    kind = f"{name} {getattr(activation, '__name__', 'a layer')}" if activation else name
    return getattr(keras.layers, name, None) is type(layer) and bool(_CHEAP.fullmatch(kind))


def _named(layer: keras.layers.Layer, path: str) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields the layers of a layer with their paths, outer ones first, each once."""
    inner = flatten_layers(layer)[1:]
    deeper = {id(one) for other in inner for one in flatten_layers(other)[1:]}
    for one in inner:
        if id(one) not in deeper:
            yield path + one.name, one
            yield from _named(one, f"{path}{one.name}/")


def _has_marked_layers(layer: keras.layers.Layer, marked: Sequence[keras.layers.Layer]) -> bool:
    """Returns whether a model inside of a model was made in one `keras.RematScope` with its layers.

    Rematerialized as a whole, it would need the memory of all its layers at once.
    """
    inner = {id(one) for one in flatten_layers(layer)[1:]}
    return isinstance(layer, keras.Model) and any(id(other) in inner for other in marked)
