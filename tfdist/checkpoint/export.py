"""The model of a checkpoint as a file that plain Keras or TensorFlow loads."""

from __future__ import annotations

import json
from pathlib import Path

import keras

from tfdist.checkpoint import manifest, variables
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.errors import ConfigurationError

#: The key of a state that has the model's architecture.
MODEL = "model"


def architecture(model: keras.Model) -> str | None:
    """Returns what a model is, without what it was compiled with; None: its class cannot tell."""
    try:
        told = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):
        return None
    told.pop("compile_config", None)
    return json.dumps(told)


def export(checkpoint: str, target: Path) -> None:
    """Writes the model of a checkpoint.

    Args:
        checkpoint: Its path.
        target: A file that ends in `.keras` or `.weights.h5`, or a folder for a SavedModel.

    Raises:
        ConfigurationError: The checkpoint does not tell the architecture, or something is there
            already.
    """
    if target.exists():
        raise ConfigurationError(f"{target} is there already: name another file.")
    saved = Snapshot.unpacked(Packed.read(checkpoint))
    if (told := saved.state[MODEL]) is None:
        raise ConfigurationError(
            f"{checkpoint}: the class of the model has no get_config, so its layers are not known: "
            "go on with the training instead, trainer.model.save(...) writes it."
        )
    try:
        model = keras.models.model_from_json(told)
    except (TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"{checkpoint}: its model cannot be made here ({reason}): import the module with its "
            "own layers, registered by keras.saving.register_keras_serializable."
        ) from error
    _give(model, saved, checkpoint)
    if target.name.endswith((".keras", ".weights.h5")):
        save = model.save if target.suffix == ".keras" else model.save_weights
        save(target)
    else:
        model.export(target, verbose=False)


def load_weights(model: keras.Model, checkpoint: str) -> None:
    """Gives a model the weights of a checkpoint.

    Args:
        model: Built, with the layers of the one that was trained.
        checkpoint: Its path.

    Raises:
        ConfigurationError: The checkpoint is damaged, or another model's.
    """
    manifest.verify(checkpoint)
    _give(model, Snapshot.unpacked(Packed.read(checkpoint)), checkpoint)


def _give(model: keras.Model, saved: Snapshot, checkpoint: str) -> None:
    # Alone the model is called otherwise than where it was trained: order and shapes tell.
    paths = {f"{variables.MODEL}/{i:05d}": v.path for i, v in enumerate(model.variables)}
    own = Snapshot({n: v for n, v in saved.variables.items() if n in paths}, paths)
    variables.give({variables.MODEL: model.variables}, own, checkpoint, within_epoch=True)
