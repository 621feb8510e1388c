"""Saved models: saving on a full disk, `--evaluate`, and `--export` in other formats."""

from __future__ import annotations

import errno
import functools
import importlib.util
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pipelines
from pipelines import storage
from tfdist.config import Run, Spread, StrategyOptions, TrainConfig
from tfdist.console import folders, tables
from tfdist.console.files import replacing
from tfdist.console.folders import download_folder
from tfdist.errors import (
    ConfigurationError,
    DataError,
    MissingError,
    TfdistError,
    first_line,
    summary,
)

if TYPE_CHECKING:
    import keras

    from tfdist.run.recipe import Recipe

#: Fields that affect an evaluation. All other settings are in the model's file.
_READ_BY_EVALUATE = (
    {*Run.model_fields, *Spread.model_fields, *StrategyOptions.model_fields}
    | {"batch_size", "steps_per_call", "limit_steps", "evaluate"}
) - {"run_dir", "smoke", "sync_batch_norm", "replica_random"}


class Format(NamedTuple):
    """An export format: Keras's name for it, its file in the run folder, and required modules.

    Those of KerasHub have the name of the method that writes them, of a task or of its backbone.
    """

    name: str
    file: str
    modules: tuple[str, ...] = ()
    of: Callable[[Any], Any] | None = None

    def write(self, model: Any, path: Path) -> None:
        """Writes a model to a path.

        Raises:
            TypeError: The model's class cannot.
        """
        if self.of is None:
            model(_zeros_for(model))  # Exporters need a model that has been called.
            model.export(path, format=self.name, verbose=False)
            return
        part = self.of(model)
        if not hasattr(part, self.name):
            raise TypeError(f"{type(model).__name__} is no task of KerasHub")
        getattr(part, self.name)(str(path))


def _task(model: Any) -> Any:
    return model


def _backbone(model: Any) -> Any:
    return getattr(model, "backbone", None)


#: The weights of LoRA alone. A saved model has them merged into its kernels.
ADAPTER = "adapter"
FORMATS = {
    "saved_model": Format("tf_saved_model", "saved_model"),
    "onnx": Format("onnx", "model.onnx", ("onnx", "tf2onnx")),
    "tflite": Format("litert", "model.tflite", ("tensorflow.lite",)),
    "preset": Format("save_to_preset", "preset", ("keras_hub",), _task),
    "safetensors": Format("export_to_transformers", "safetensors", ("safetensors",), _task),
    ADAPTER: Format("save_lora_weights", "adapter.lora.h5", ("keras_hub",), _backbone),
}


def check_evaluate_flags(given: Collection[str]) -> None:
    """Checks the fields that were set together with `--evaluate`.

    Args:
        given: Fields that were set on the command line. A file of a run may set any.

    Raises:
        ConfigurationError: One of them has no effect.
    """
    if idle := [
        name for name in given if name in set(TrainConfig.model_fields) - _READ_BY_EVALUATE
    ]:
        flag = f"--{idle[0].replace('_', '-')}"
        raise ConfigurationError(f"{flag} has no effect with --evaluate. Remove it.")


def evaluate(config: TrainConfig) -> dict[str, float]:
    """Evaluates the model that `config.evaluate` names on the recipe's validation data.

    Prints a table of the results.

    Raises:
        TfdistError: There is no such model, or no data to evaluate it on.
    """
    from tfdist.checkpoint.store import checkpoints_of
    from tfdist.run import from_config, recipe
    from tfdist.trainer import Trainer

    try:
        path = str(storage.at(str(config.evaluate)))
    except pipelines.DataError as error:
        raise ConfigurationError(f"--evaluate {error}") from None
    is_file = _is_file(path)  # Checked before the data are prepared.
    workload = recipe.find(config.recipe)  # Importing it registers the model's own classes.
    checkpoint = None if is_file else checkpoints_of(path)[0]
    strategy = from_config.make_strategy(config)
    data, validation = from_config.make_data(config, workload, strategy)

    def build() -> keras.Model:
        model = load(path)
        recipe.prepare(workload, config, model)
        return model

    if checkpoint:
        num_steps = recipe.num_steps(data)
        build = functools.partial(_from_checkpoint, checkpoint, workload, config, num_steps)
    if validation is None:
        raise DataError(f"recipe {config.recipe!r} has no validation_data to evaluate on.")
    trainer = Trainer(
        build,
        strategy,
        precision=None if is_file else config.precision,
        steps_per_call=config.steps_per_call,
        watchdog_seconds=config.watchdog_seconds,
    )
    prints = strategy.group.is_chief and config.verbose != 0
    verbose = config.verbose if prints else 0
    results: dict[str, float] = trainer.evaluate(validation, verbose=verbose, return_dict=True)
    if prints:
        tables.facts(
            [
                ("model", str(config.evaluate)),
                ("recipe", config.recipe),
                ("strategy", strategy.name),
            ],
            [(name, f"{value:.6g}") for name, value in results.items()],
        )
    return results


def load(file: str) -> keras.Model:
    """Returns a saved model with the loss and metrics that it was compiled with.

    Args:
        file: Its file, or the URL of one in an object store.

    Raises:
        ConfigurationError: It cannot be loaded, or was saved without them.
    """
    import keras

    if storage.is_object_store(file):
        with download_folder() as folder:
            copy = Path(folder) / "model.keras"
            storage.RemotePath(file).download(copy)
            return load(str(copy))
    try:
        model = keras.saving.load_model(file)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"--evaluate {file}: expected a model that Keras saved as .keras: {first_line(error)}"
        ) from error
    if not model.compiled:
        raise ConfigurationError(
            f"--evaluate {file}: expected a compiled model, got one without loss and metrics. "
            "Compile it and save it again."
        )
    return model


def load_uncompiled(file: Path) -> keras.Model:
    """Returns a saved model without its compilation.

    Tasks of KerasHub compile themselves, with an optimizer that has none of the saved state.
    """
    import keras

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        return keras.saving.load_model(file, compile=False)


def check_exporters(names: Sequence[str]) -> None:
    """Checks before a training that the exporters are installed.

    Raises:
        MissingError: A module is not installed.
    """
    for name in names:
        missing = [m for m in FORMATS[name].modules if importlib.util.find_spec(m) is None]
        if missing:
            raise MissingError(
                f"--export {name} needs {' and '.join(missing)}: pip install {' '.join(missing)}."
            )


def export(names: Sequence[str], model: Path, trained: keras.Model | None = None) -> dict[str, str]:
    """Exports a saved model for inference, to the folder of its file.

    Args:
        names: Names of `FORMATS`.
        model: The `.keras` file to read.
        trained: The model of the trainer, from which `ADAPTER` is written.

    Returns:
        The written files by the name of the format.

    Raises:
        TfdistError: A format cannot represent a layer, or the disk is full.
    """
    written = {}
    for name in names:
        target = FORMATS[name]
        try:
            source = trained if name == ADAPTER else load_uncompiled(model)
            target.write(source, model.parent / target.file)
        except Exception as error:  # Keras, a converter and the file system each raise their own.
            problem = full_disk_message(error) or summary(error)
            raise TfdistError(f"--export {name}: {problem}\n{model} is saved.") from error
        written[name] = str(model.parent / target.file)
    return written


def _is_file(path: str) -> bool:
    """Returns whether a path or URL is that of a file, and not of a folder of checkpoints."""
    if storage.is_object_store(path):
        try:
            remote = storage.RemotePath(path)
            if (is_file := remote.is_file()) or remote.sizes():
                return is_file
        except pipelines.DataError as error:
            raise ConfigurationError(f"--evaluate {error}") from None
    elif (local := Path(path)).exists():
        return local.is_file()
    raise ConfigurationError(f"--evaluate {path}: the file does not exist.")


def _from_checkpoint(
    checkpoint: str, workload: Recipe, config: TrainConfig, steps_per_epoch: int | None
) -> keras.Model:
    """Returns the recipe's model with a checkpoint's weights, not their moving averages.

    The learning rate is constant, because a schedule may not fit the data that are evaluated.

    Raises:
        ConfigurationError: The checkpoint is damaged, or is of another model.
    """
    from tfdist.checkpoint.export import load_weights

    constant = config.model_copy(update={"lr_rule": "constant", "warmup_epochs": 0.0})
    model = workload.build_model(constant, steps_per_epoch)
    load_weights(model, checkpoint)
    return model


def _zeros_for(model: keras.Model) -> Any:
    """Returns inputs of one row of zeros, in the structure that the model takes."""
    import keras

    def zeros(tensor: Any) -> Any:
        return keras.ops.zeros([1 if dim is None else dim for dim in tensor.shape], tensor.dtype)

    inputs = getattr(model, "inputs", None)
    if inputs:
        inputs_of_model = inputs[0] if isinstance(model, keras.Sequential) else model.input
        return keras.tree.map_structure(zeros, inputs_of_model)
    shape = model.get_build_config()["input_shape"]  # A subclass of Model has no symbolic inputs.
    return zeros(keras.KerasTensor(shape, model.compute_dtype))


# ---- full disks ----


_OTHER_BYTES = 2**20  # of metrics, curves and TensorBoard's events
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def probe_space(path: Path, model: Any) -> None:
    """Checks that a folder's disk has enough space for a run, by allocating it temporarily.

    Raises:
        OSError: There is not enough space, or no permission.
    """
    import tensorflow as tf

    variables = [*model.variables, *model.optimizer.variables]
    sizes = (math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    num_bytes = sum(sizes) + _OTHER_BYTES
    with replacing(path / "probe") as file, file.open("wb") as opened:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened.fileno(), 0, num_bytes)
        elif shutil.disk_usage(path).free < num_bytes:  # macOS
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (path / "probe").unlink()


def full_disk_message(error: Exception) -> str:
    """Returns an error's message about a full disk or an exceeded quota; empty for other errors."""
    return next((os.strerror(number) for number in _FULL if os.strerror(number) in str(error)), "")


def save_model(model: Any, path: Path) -> tuple[Path, Exception | None]:
    """Saves a Keras model, in another folder if the disk is full.

    Returns:
        The file that was written, and the error if it is not `path`.

    Raises:
        Exception: The error of saving to `path`, if the model cannot be saved anywhere.
    """
    try:
        with replacing(path) as file:
            model.save(file)
    except Exception as error:  # the system, h5py and zipfile raise different errors
        for place in folders.rescue():
            try:
                folder = Path(tempfile.mkdtemp(prefix="tfdist-", dir=place))
            except OSError:
                continue
            try:
                with replacing(folder / path.name) as file:
                    model.save(file)
            except Exception:
                folder.rmdir()
                continue
            return folder / path.name, error
        raise
    return path, None
