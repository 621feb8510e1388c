"""Finds fields that would have no effect in a run. Setting such a field is an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run.recipe import Recipe

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

#: Fields that have an effect only if `build_model` or `callbacks` reads them.
OF_RECIPES = (
    "learning_rate", "lr_scaling", "lr_rule", "warmup_epochs", "jit_compile", "run_eagerly"
)  # fmt: skip

#: More such fields, reported only if the user sets them. The value names the setting of another
#: field that they depend on, if any.
ONLY_WITH = {
    "lr_reference_batch": "lr_scaling: linear or sqrt",
    "lr_decay_epochs": "lr_rule: step",
    "lr_decay_factor": "lr_rule: step",
    "lr_power": "lr_rule: polynomial",
    "warmup_start": "warmup_epochs",
    "momentum": "optimizer: sgd or lars",
    "nesterov": "optimizer: sgd",
    "beta_1": "optimizer: adam, adamw or lamb",
    "beta_2": "optimizer: adam, adamw or lamb",
    "epsilon": "optimizer: adam, adamw or lamb",
    "clip_norm": "",
    "global_clip_norm": "",
    "clip_value": "",
    "optimizer": "",
    "weight_decay": "",
    "label_smoothing": "",
    "ema": "",
    "model": "",
    "data": "",
    "read_ahead": "",
    "cache_dir": "",
}


class Watched:
    """A configuration that records which fields are read."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        # A method such as model_dump may read all of them.
        self._read |= {name} if name in TrainConfig.model_fields else {*OF_RECIPES, *ONLY_WITH}
        return getattr(self._config, name)

    def as_config(self) -> TrainConfig:
        """Returns this object for functions that take a configuration."""
        return cast(TrainConfig, self)

    def has_read(self, name: str) -> bool:
        """Returns whether a field has been read."""
        return name in self._read

    def unread(self, recipe: Recipe) -> list[str]:
        """Returns the fields of `OF_RECIPES` that the recipe did not read.

        Args:
            recipe: The recipe, after it made its model and callbacks.

        Raises:
            ConfigurationError: A flag or a file set a field that was not read.
        """
        unread = [name for name in (*OF_RECIPES, *ONLY_WITH) if name not in self._read]
        for name in _asked_for(unread, self._config, recipe):
            other = ONLY_WITH.get(name)
            raise ConfigurationError(
                f"{name}={getattr(self._config, name)} has no effect: recipe "
                f"{self._config.recipe!r} does not read config.{name}"
                f"{f' without {other}' if other else ''}. Remove it, or "
                f"{f'set {other}' if other else 'read it in build_model'}."
            )
        return [name for name in unread if name in OF_RECIPES]


def check_spread(config: TrainConfig, recipe: Recipe, strategy: Strategy) -> None:
    """Checks fields that need several replicas or processes.

    A Trainer in a script accepts them anywhere, but a command line is for one run.

    Raises:
        ConfigurationError: A flag or a file set one, but there is one replica or process.
    """
    idle = {
        "sync_batch_norm": (strategy.num_replicas == 1, "with one replica"),
        "watchdog_seconds": (strategy.group.size == 1, "because no process waits for another"),
    }
    names = [name for name, (is_idle, _) in idle.items() if is_idle]
    for name in _asked_for(names, config, recipe):
        raise ConfigurationError(
            f"{name}={getattr(config, name)} has no effect {idle[name][1]}. Remove it."
        )


def _asked_for(names: Iterable[str], config: TrainConfig, recipe: Recipe) -> list[str]:
    """Returns the fields whose values differ from the recipe's defaults."""
    usual = TrainConfig(**recipe.DEFAULTS)
    return [name for name in names if getattr(config, name) != getattr(usual, name)]
