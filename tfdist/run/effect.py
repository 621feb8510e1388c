"""Which fields a recipe goes by, of those that nobody else can honour."""

from __future__ import annotations

from typing import Any, cast

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run.recipe import Recipe

#: What `build_model` and `callbacks` make of them is all that comes of them.
OF_RECIPES = (
    "learning_rate", "lr_scaling", "lr_rule", "warmup_epochs", "jit_compile", "run_eagerly"
)  # fmt: skip

#: The same, of which nothing is said unless they are set: many recipes have their own, or none.
#: Some need another field's value beside them: which that is.
ONLY_WITH = {
    "lr_reference_batch": "lr_scaling: linear or sqrt",
    "lr_decay_epochs": "lr_rule: step",
    "lr_decay_factor": "lr_rule: step",
    "lr_power": "lr_rule: polynomial",
    "warmup_start": "warmup_epochs",
    "momentum": "optimizer: sgd or lars",
    "optimizer": "",
    "weight_decay": "",
    "label_smoothing": "",
    "ema": "",
}


class Watched:
    """A configuration that notes what is read of it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        # A method, say model_dump, may hand out all of them.
        self._read |= {name} if name in TrainConfig.model_fields else {*OF_RECIPES, *ONLY_WITH}
        return getattr(self._config, name)

    def as_config(self) -> TrainConfig:
        """The same for functions that take a configuration."""
        return cast(TrainConfig, self)

    def unread(self, recipe: Recipe) -> list[str]:
        """The fields that the recipe leaves aside.

        Args:
            recipe: Has made its model and its callbacks.

        Raises:
            ConfigurationError: One of them was set by a flag or a file, and would do nothing.
        """
        unread = [name for name in (*OF_RECIPES, *ONLY_WITH) if name not in self._read]
        usual = TrainConfig(**recipe.DEFAULTS)
        for name in unread:
            if (asked := getattr(self._config, name)) != getattr(usual, name):
                other = ONLY_WITH.get(name)
                raise ConfigurationError(
                    f"{name}={asked} has no effect: recipe {self._config.recipe!r} does not read "
                    f"config.{name}{f' without {other}' if other else ''}: leave it out, or "
                    f"{f'set {other}' if other else 'read it in build_model'}."
                )
        return [name for name in unread if name in OF_RECIPES]
