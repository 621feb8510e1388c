"""`--export`: writes the trained model in other formats, with Keras's exporters."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdist.errors import MissingError, TfdistError

if TYPE_CHECKING:
    import keras


class Form(NamedTuple):
    """An export format: Keras's name for it, its file in the run folder, and required modules."""

    name: str
    file: str
    modules: tuple[str, ...] = ()


FORMS = {
    "saved_model": Form("tf_saved_model", "saved_model"),
    "onnx": Form("onnx", "model.onnx", ("onnx", "tf2onnx")),
    "tflite": Form("litert", "model.tflite", ("tensorflow.lite",)),
}


def check(names: Sequence[str]) -> None:
    """Checks before a training that the exporters are installed.

    Raises:
        MissingError: A module is not installed.
    """
    for name in names:
        missing = [m for m in FORMS[name].modules if importlib.util.find_spec(m) is None]
        if missing:
            raise MissingError(
                f"--export {name} needs {' and '.join(missing)}: pip install 'tfdist[{name}]'."
            )


def write(names: Sequence[str], model: Path) -> dict[str, str]:
    """Exports a saved model for inference, beside its file.

    Args:
        names: Names of `FORMS`.
        model: The `.keras` file to read.

    Returns:
        The written files by the name of the format.

    Raises:
        TfdistError: A format cannot represent a layer, or the disk is full.
    """
    import keras

    written = {}
    for name in names:
        form = FORMS[name]
        try:
            loaded = keras.saving.load_model(model, compile=False)
            loaded(_row(loaded))  # exporters want a model that has been called
            loaded.export(model.parent / form.file, format=form.name, verbose=False)
        except Exception as error:  # of Keras, of a converter, of the system
            said = str(error).strip().partition("\n")[0]
            raise TfdistError(
                f"--export {name}: {type(error).__name__}: {said}\n{model} is saved."
            ) from error
        written[name] = str(model.parent / form.file)
    return written


def _row(model: keras.Model) -> Any:
    """Returns inputs of one row of zeros, in the model's own structure."""
    import keras

    def zeros(tensor: Any) -> Any:
        return keras.ops.zeros([1 if dim is None else dim for dim in tensor.shape], tensor.dtype)

    inputs = getattr(model, "inputs", None)
    if inputs:  # a Sequential has one
        known = inputs[0] if isinstance(model, keras.Sequential) else model.input
        return keras.tree.map_structure(zeros, known)
    shape = model.get_build_config()["input_shape"]  # a class of its own: what it was built for
    return zeros(keras.KerasTensor(shape, model.compute_dtype))
