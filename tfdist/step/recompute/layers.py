"""Which layers of a model are computed again on the way back: those that `recompute=` names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import keras

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.step.recompute.call import recomputed
from tfdist.upstream import keras_remat
from tfdist.upstream.keras_model import flatten_layers, is_functional

#: Of which nothing is gained: they keep no more than what they return.
_CHEAP = (
    keras.layers.InputLayer,
    keras.layers.BatchNormalization,
    keras.layers.Embedding,
    keras.layers.Flatten,
    keras.layers.Reshape,
)


def prepare(recompute: str) -> None:
    """Lets `keras.remat` be exact, before a model is built, and checks what is to be recomputed.

    Args:
        recompute: `"none"`, `"all"` or a regular expression.

    Raises:
        ConfigurationError: It is none of these.
    """
    keras_remat.carry_out_by(recomputed)
    try:
        re.compile(recompute)
    except (re.error, TypeError) as error:
        raise ConfigurationError(
            f"recompute={recompute!r}: expected 'none', 'all' or a regular expression that finds "
            f"names of layers ({error})."
        ) from error


def chosen(model: keras.Model, recompute: str) -> list[keras.layers.Layer]:
    """Returns the layers of a model that are computed again, each as a whole.

    The outermost of those that are found; of models inside of a model, their layers.

    Args:
        model: Built.
        recompute: As `prepare` takes it, searched for in names like `"encoder/block_1/dense"`.

    Raises:
        ConfigurationError: No layer has such a name.
    """
    if recompute == "none":
        return []
    named = dict(_named(model, ""))
    found, inside = [], set[int]()
    for path, layer in named.items():
        if is_functional(layer) or id(layer) in inside:
            continue
        is_meant = not isinstance(layer, _CHEAP) if recompute == "all" else None
        if is_meant or (is_meant is None and re.search(recompute, path)):
            found.append(layer)
            inside |= {id(inner) for inner in flatten_layers(layer)}
    if not found and recompute != "all":
        raise ConfigurationError(
            f"recompute={recompute!r} finds none of the layers {', '.join(list(named)[:8])}."
        )
    return found


@contextmanager
def computed_again(model: keras.Model, recompute: str, sync_batch_norm: bool) -> Iterator[None]:
    """Within it, while a step is traced, these layers are handed to `keras.remat`.

    Besides those that were made in a `keras.RematScope`.

    Raises:
        UnsupportedModelError: One of them exchanges sums with other replicas.
    """
    with ExitStack() as stack:
        again = chosen(model, recompute)
        for layer in again:
            stack.enter_context(keras_remat.asking(layer))
        asked = [layer for layer in flatten_layers(model) if keras_remat.asks(layer)]
        _check_alone([*again, *asked], sync_batch_norm)
        for layer in asked:
            if layer is model or isinstance(layer, _CHEAP) or _asks_for_its_layers(layer, asked):
                stack.enter_context(keras_remat.asking(layer, does=False))
        yield


def _asks_for_its_layers(layer: keras.layers.Layer, asked: Sequence[keras.layers.Layer]) -> bool:
    """Whether a model inside of a model was made in one scope with layers of its own.

    Computed again as a whole, all that these keep would be there at a time.
    """
    inner = {id(own) for own in flatten_layers(layer)[1:]}
    return isinstance(layer, keras.Model) and any(id(other) in inner for other in asked)


def _named(layer: keras.layers.Layer, path: str) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields the layers of a layer with their paths, outer ones first, each once."""
    inner = flatten_layers(layer)[1:]
    deeper = {id(own) for other in inner for own in flatten_layers(other)[1:]}
    for own in inner:
        if id(own) not in deeper:
            yield path + own.name, own
            yield from _named(own, f"{path}{own.name}/")


def _check_alone(layers: Sequence[keras.layers.Layer], sync_batch_norm: bool) -> None:
    for layer in layers:
        for inner in flatten_layers(layer):
            is_norm = isinstance(inner, keras.layers.BatchNormalization)
            if is_norm and inner is not layer and (sync_batch_norm or inner.synchronized):
                raise UnsupportedModelError(
                    f"{layer.name!r} cannot be computed again on the way back: {inner.name!r} in "
                    "it takes moments of all replicas. Leave it out of recompute=, or sync_batch_"
                    "norm."
                )
