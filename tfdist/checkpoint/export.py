"""Exports the model of a checkpoint to a file that plain Keras or TensorFlow loads."""

from __future__ import annotations

import json
from pathlib import Path

import keras

from tfdist.checkpoint import variables
from tfdist.checkpoint.snapshot import Snapshot
from tfdist.checkpoint.store import load
from tfdist.console import tables
from tfdist.errors import ConfigurationError, first_line

#: The key of the model's architecture in a saved state.
MODEL = "model"


def architecture(model: keras.Model) -> str | None:
    """Returns a model's architecture as JSON; None if its class cannot be serialized."""
    try:
        content = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):
        return None
    content.pop("compile_config", None)
    return json.dumps(content)


def export(checkpoint: str, target: Path) -> None:
    """Writes the model of a checkpoint.

    Args:
        checkpoint: The path of the checkpoint.
        target: A file that ends in `.keras` or `.weights.h5`, or a folder for a SavedModel.

    Raises:
        ConfigurationError: The checkpoint is damaged or has no architecture, or the target exists
            or has another suffix, or its folder does not exist.
    """
    tables.check_path(str(target), ".keras", ".weights.h5", or_folder=True)
    if target.exists():
        raise ConfigurationError(f"{target} already exists: choose another name.")
    saved = Snapshot.unpacked(load(checkpoint), checkpoint)
    if (config := saved.state[MODEL]) is None:
        raise ConfigurationError(
            f"{checkpoint}: the class of the model has no get_config, so the model cannot be "
            "rebuilt from a checkpoint. Resume training, and call trainer.model.save."
        )
    if saved.state.get(variables.FROZEN):
        raise ConfigurationError(
            f"{checkpoint} has no frozen weights, so it is no complete model. Resume training, and "
            "call trainer.model.save."
        )
    try:
        model = keras.models.model_from_json(config)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{checkpoint}: the model cannot be rebuilt ({first_line(error)}). Import the module "
            "that defines its layers, and register them with "
            "keras.saving.register_keras_serializable."
        ) from error
    _assign(model, saved, checkpoint)
    if not target.suffix:
        model.export(target, verbose=False)
    else:
        save = model.save if target.suffix == ".keras" else model.save_weights
        save(target)


def load_weights(model: keras.Model, checkpoint: str) -> None:
    """Assigns the weights of a checkpoint to a model.

    Raises:
        ConfigurationError: The checkpoint is damaged, unreadable, or from another model.
    """
    _assign(model, Snapshot.unpacked(load(checkpoint), checkpoint), checkpoint)


def _assign(model: keras.Model, saved: Snapshot, checkpoint: str) -> None:
    # A rebuilt model may have other variable names, so compare order and shapes only.
    paths = {f"{variables.MODEL}/{i:05d}": v.path for i, v in enumerate(model.variables)}
    weights = Snapshot({n: v for n, v in saved.variables.items() if n in paths}, paths, saved.state)
    groups = {variables.MODEL: model.variables}
    if saved.state.get(variables.FROZEN):
        sums = variables.checksums(variables.named_frozen(groups, model))
        variables.check_frozen(sums, saved, checkpoint)
    variables.restore(groups, weights, checkpoint, within_epoch=True)
