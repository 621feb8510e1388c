"""The user's own model for `tfdist plan`: a recipe, a Python file, a .keras file, or KerasHub's."""

from __future__ import annotations

import functools
import inspect
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.config import TrainConfig
from tfdist.console.settings_file import HYPERPARAMETER_PREFIX, Setting
from tfdist.errors import ConfigurationError, MissingError, UnsupportedModelError
from tfdist.run import flags
from tfdist.run import recipe as recipes

if TYPE_CHECKING:
    import keras

HUB = "hub:"


@dataclass(frozen=True)
class Program:
    """A user's model and how it is trained. Pickled by its arguments.

    Attributes:
        model: A recipe's name, a Python file (a recipe, or with `build_model()`), a `.keras` file,
            or `hub:` and a preset of KerasHub, or the folder of one.
        sizes: Sizes of the axes of inputs that the model leaves open.
        overrides: Fields of `TrainConfig` that the user set.
        settings: Hyperparameters of a recipe.
    """

    model: str
    sizes: tuple[int, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> str | None:
        """Policy to build the model with; None: its own."""
        if self._recipe is not None:
            return self._config.precision
        return self.overrides.get("precision")

    @property
    def is_recipe(self) -> bool:
        """Whether the training command takes it."""
        return self._recipe is not None

    @property
    def batch_size(self) -> int | None:
        """The recipe's batch size, or None."""
        return None if self._recipe is None else self._config.batch_size

    def build(self) -> keras.Model:
        """Returns the compiled model.

        Raises:
            ConfigurationError: There is no such model, or it is not compiled.
        """
        if self._recipe is not None:
            return self._recipe.build_model(self._config, recipes.num_steps(self._data))
        model = self._builder()
        optimizer = self.overrides.get("optimizer")
        if optimizer or not model.compiled:
            from tfdist import optimizers

            fields: dict[str, Any] = {"optimizer": optimizer or "adam"}
            config = TrainConfig(**fields)
            loss = getattr(model, "loss", None)
            if loss is None and not self.model.startswith(HUB):
                raise ConfigurationError(
                    f"{self.model}: the model is not compiled, so its loss is unknown. Compile it "
                    "before you save it, or in build_model."
                )
            model.compile(optimizers.create(config, config.learning_rate), loss or _hub_loss(model))
        return model

    def batch(self, num_rows: int) -> Any:
        """Returns a batch of zeros, because values do not affect the results."""
        from tfdist.memory import zeros

        return zeros(self._spec, num_rows)

    @functools.cached_property
    def _recipe(self) -> recipes.Recipe | None:
        if self.model.startswith(HUB) or self.model.endswith(".keras"):
            return None
        if self.model.endswith(".py"):
            module = recipes.module_of_file(Path(self.model))
            if not hasattr(module, "DEFAULTS"):
                self._check(getattr(module, "build_model", None))
                return None
        return recipes.find(self.model)

    def _check(self, build_model: Any) -> None:
        """Raises an error unless a file's `build_model` can be called."""
        try:
            inspect.signature(build_model).bind()
        except TypeError:
            raise ConfigurationError(
                f"{self.model}: expected a recipe, or a function build_model() without arguments "
                "that returns the compiled model."
            ) from None

    @functools.cached_property
    def _config(self) -> TrainConfig:
        recipe = recipes.find(self.model)
        given = {"recipe": self.model, **self.overrides}
        given |= {f"{HYPERPARAMETER_PREFIX}{name}": v for name, v in self.settings.items()}
        layer = {name: Setting(value, flags.flag(name)) for name, value in given.items()}
        layers = [recipes.defaults(recipe, flags.resolve([layer])), layer]
        config = flags.resolve(layers)
        known = recipes.hyperparameters(recipe, config.model)
        return flags.with_hyperparameters(config, layers, known)

    @functools.cached_property
    def _data(self) -> Any:
        assert self._recipe is not None
        return self._recipe.train_data(self._config)

    @functools.cached_property
    def _spec(self) -> Any:
        """The shapes and dtypes of a batch."""
        if self._recipe is not None:
            return self._data.element_spec
        from tfdist.upstream.keras_variables import weights_as_shapes

        with weights_as_shapes():
            return _spec_of(self.build(), self.sizes, self.model)

    @functools.cached_property
    def _builder(self) -> Callable[[], keras.Model]:
        if self.model.startswith(HUB):
            return functools.partial(_from_hub, self.model.removeprefix(HUB))
        if self.model.endswith(".keras"):
            return functools.partial(_from_keras_file, Path(self.model))
        return recipes.module_of_file(Path(self.model)).build_model


def _from_keras_file(path: Path) -> keras.Model:
    """Returns the model of a `.keras` file, without its weights.

    Raises:
        ConfigurationError: The file is missing, or no archive of Keras 3.
    """
    import keras

    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{path}: expected a .keras file of Keras 3 ({error}).") from None
    try:
        return keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{path} cannot be built from its configuration "
            f"({str(error).splitlines()[0]}). Plan a Python file with its build_model instead."
        ) from error


def _from_hub(preset: str) -> keras.Model:
    """Returns KerasHub's language model of a preset, or its backbone, without its weights.

    Args:
        preset: The name of a preset, whose configuration is downloaded, or its folder.

    Raises:
        ConfigurationError: There is no such preset.
    """
    try:
        from keras_hub import models
    except ImportError:
        raise MissingError(f"{HUB}{preset} needs KerasHub: pip install 'tfdist[hub]'.") from None
    try:
        backbone = models.Backbone.from_preset(preset, load_weights=False)
        tasks = [one for one in vars(models).values() if _is_language_model(one, type(backbone))]
        return tasks[0](backbone, preprocessor=None) if tasks else backbone
    except Exception as error:
        raise ConfigurationError(
            f"{HUB}{preset}: the configuration cannot be read ({str(error).splitlines()[0]}). Name "
            "a preset of KerasHub, or a folder with its config.json."
        ) from error


def _is_language_model(task: Any, backbone: type) -> bool:
    from keras_hub import models

    is_task = isinstance(task, type) and issubclass(task, models.CausalLM)
    return is_task and getattr(task, "backbone_cls", None) is backbone


def _hub_loss(model: keras.Model) -> Any:
    """Returns the loss of a language model, or for the outputs of a backbone."""
    import keras

    if hasattr(model, "backbone"):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return "mean_squared_error"


def _spec_of(model: keras.Model, sizes: Sequence[int], name: str) -> Any:
    """Returns inputs and targets of a model that is trained on arrays.

    The targets have the shapes of the outputs; those of sparse losses, without the last axis.

    Raises:
        ConfigurationError: Sizes are missing.
    """
    import keras

    remaining = list(sizes)

    def known(leaf: Any) -> keras.KerasTensor:
        if (missing := leaf.shape[1:].count(None)) > len(remaining):
            raise ConfigurationError(
                f"{name}: the input {leaf.name!r} of shape {tuple(leaf.shape)} has {missing} "
                "unknown sizes. Name them with --input."
            )
        shape = [remaining.pop(0) if size is None else size for size in leaf.shape[1:]]
        return keras.KerasTensor((None, *shape), leaf.dtype, name=leaf.name)

    inputs: Any = getattr(model, "input", None)
    if inputs is None and getattr(model, "inputs", None):  # a Sequential model
        (inputs,) = model.inputs
    if inputs is None:
        if not sizes:
            raise ConfigurationError(
                f"{name}: the model has no Input, so the shape of its data is unknown. Name the "
                "shape of an example with --input, or plan a recipe, which has data."
            )
        inputs = keras.KerasTensor((None, *sizes), "float32")
    # Each open axis of sequences has the same length.
    if len(remaining) == 1:
        remaining *= sum(leaf.shape[1:].count(None) for leaf in keras.tree.flatten(inputs))
    x = keras.tree.map_structure(known, inputs)
    outputs = model.compute_output_spec(x)
    losses = model.loss

    def target(output: Any, loss: Any) -> keras.KerasTensor:
        name = loss if isinstance(loss, str) else getattr(loss, "name", "")
        if name.startswith("sparse") or getattr(loss, "__name__", "").startswith("sparse"):
            return keras.KerasTensor(output.shape[:-1], "int64")
        return keras.KerasTensor(output.shape, output.dtype)

    if isinstance(outputs, dict):
        of = losses if isinstance(losses, dict) else dict.fromkeys(outputs, losses)
        return x, {key: target(value, of.get(key)) for key, value in outputs.items()}
    flat = keras.tree.flatten(outputs)
    if len(flat) == 1:
        one = losses[0] if isinstance(losses, list) else losses
        return x, target(flat[0], next(iter(one.values())) if isinstance(one, dict) else one)
    each = losses if isinstance(losses, list) else [losses] * len(flat)
    if isinstance(losses, dict):
        each = [losses.get(key) for key in model.output_names]
    return x, [target(output, loss) for output, loss in zip(flat, each, strict=True)]
