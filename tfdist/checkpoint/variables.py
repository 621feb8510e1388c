"""The variables of a training in one canonical form, whoever computes.

They are named by whose they are and by their order, since Keras numbers its own names through a
whole process. A model has plain variables, on one device; what copies there are is not saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint.snapshot import Snapshot
from tfdist.errors import ConfigurationError
from tfdist.upstream import keras_model

#: Variables by whose they are: `model`, `optimizer 1`, `metrics`, ...
Groups = Mapping[str, Sequence[keras.Variable]]

#: The group of the model's own.
MODEL = "model"

#: Whose have to be there, all of them, or it is another model.
_OF_MODEL = (MODEL, "optimizer")

_SEED = "seed of what draws without one"


def take(groups: Groups, snapshot: Snapshot) -> None:
    """Puts the values that variables have now into a snapshot.

    What is on the host is not copied: TensorFlow copies a variable that is written while somebody
    still holds its value.
    """
    with tf.device("CPU:0"):
        for name, variable in _named(groups).items():
            snapshot.variables[name] = tf.identity(variable.value)
            snapshot.paths[name] = variable.path


def give(groups: Groups, snapshot: Snapshot, where: str, within_epoch: bool) -> None:
    """Gives variables the values of a snapshot.

    Args:
        groups: Of the model as it is now.
        snapshot: Of the same model.
        where: It lies.
        within_epoch: Whether metrics go on; otherwise they may be others.

    Raises:
        ConfigurationError: It is of another model.
    """
    if any(name.startswith(_SEED) for name in snapshot.variables):
        keras_model.ensured_global_generator()
    named = _named(groups)
    for name, variable in named.items():
        fits = _fits(snapshot.variables.get(name), variable)
        is_same = fits and _same_name(snapshot.paths[name], variable.path)
        if not is_same and (within_epoch or name.startswith(_OF_MODEL)):
            raise ConfigurationError(_another(where, name, variable, snapshot))
    if missing := [n for n in snapshot.variables if n.startswith(_OF_MODEL) and n not in named]:
        raise ConfigurationError(
            f"{where} is of another model: it has {snapshot.paths[missing[0]]!r}, which this one "
            "lacks. Build the same model, or keep its checkpoints in another folder."
        )
    for name, variable in named.items():
        if _fits(snapshot.variables.get(name), variable):
            variable.assign(snapshot.variables[name])


def _fits(saved: Any, variable: keras.Variable) -> bool:
    if saved is None or tuple(saved.shape) != tuple(variable.shape):
        return False
    return tf.as_dtype(saved.dtype).name == variable.dtype


def _another(where: str, name: str, variable: keras.Variable, snapshot: Snapshot) -> str:
    saved = snapshot.variables.get(name)
    has = "nothing"
    if saved is not None:
        has = f"{snapshot.paths[name]!r} of shape {tuple(saved.shape)}, {saved.dtype}"
    return (
        f"{where} is of another model: for {variable.path!r} of shape {tuple(variable.shape)}, "
        f"{variable.dtype}, it has {has}. Build the same model, or keep its checkpoints in another "
        "folder."
    )


def _named(groups: Groups) -> dict[str, keras.Variable]:
    generator = keras_model.global_generator()
    of_process = {} if generator is None else {_SEED: [generator.state]}
    return {
        f"{group}/{number:05d}": variable
        for group, variables in {**groups, **of_process}.items()
        for number, variable in enumerate(variables)
    }


def _same_name(one: str, other: str) -> bool:
    """Whether paths are alike but for the numbers by which Keras tells equal names apart."""
    return _unnumbered(one) == _unnumbered(other)


def _unnumbered(path: str) -> str:
    return re.sub(r"_\d+(?=_|/|$)", "", path)
