"""What a model calls in a forward pass, in order; and which models cannot be cut, and why."""

from __future__ import annotations

import keras

from tfdist.errors import UnsupportedModelError
from tfdist.upstream.keras_graph import operations_called_by


def of_model(model: keras.Model) -> list[keras.Operation]:
    """Returns the operation of each call, those of nested models too.

    A nested model that Keras does not call the layers of is one operation, in one stage.

    Raises:
        UnsupportedModelError: The model is called by its own code.
    """
    called = operations_called_by(model)
    if called is None:
        raise UnsupportedModelError(
            "strategy 'pipeline' cuts Functional and Sequential models, but "
            f"{type(model).__name__} is called by code of its own: build it with "
            "keras.Model(inputs, outputs), or use strategy 'mirrored'."
        )
    found: list[keras.Operation] = []
    for operation in called:
        if isinstance(operation, keras.Model) and operations_called_by(operation) is not None:
            found += of_model(operation)
        else:
            found.append(operation)
    return found


def check_steps(model: keras.Model) -> None:
    """Refuses a model whose class overrides a step.

    Raises:
        UnsupportedModelError: It does.
    """
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise UnsupportedModelError(
                f"strategy 'pipeline' orders the forward and backward passes of its stages itself, "
                f"but {type(model).__name__}.{name} is a step of its own: override compute_loss in "
                "its place, or use strategy 'mirrored'."
            )


def repeated(calls: list[keras.Operation]) -> list[tuple[int, int, str]]:
    """Returns what has to stay in one stage: first and last call, and a name, of what is shared.

    A layer that is called more than once, or layers that have a weight in common.
    """
    seen: dict[int, tuple[int, int, str]] = {}
    for place, operation in enumerate(calls):
        shared = [(id(v), v.path) for v in getattr(operation, "variables", [])]
        for key, name in shared or [(id(operation), operation.name)]:
            first, _, known = seen.get(key, (place, place, name))
            seen[key] = (first, place, known)
    return [span for span in seen.values() if span[0] < span[1]]
