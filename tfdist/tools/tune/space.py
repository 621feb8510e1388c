"""The search space: flags and their values, parsed from `--over`.

Imports neither TensorFlow nor Optuna.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    import optuna

_HYPERPARAMETER = "set."
#: Fields that the search sets itself, or that do not affect training.
_NOT_SEARCHED = {"run_dir", "resume", "evaluate", "data_dir", "set", "smoke", "verbose"}
_SYNTAX = "FLAG=A,B,C or FLAG=LOW:HIGH or FLAG=log:LOW:HIGH"


class Dimension(NamedTuple):
    """A flag and the values to try.

    Attributes:
        name: A field of `TrainConfig`, or `set.NAME` for a hyperparameter of the recipe.
        choices: The values to choose from; empty for a range.
        low: Lower end of a range, inclusive. A range between two integers has integers only.
        high: Upper end of a range, inclusive.
        log: Whether values are sampled on a logarithmic scale.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    def suggest(self, trial: optuna.Trial) -> str:
        """Returns the value of this flag for a trial, as written on the command line."""
        if self.choices:
            return str(trial.suggest_categorical(self.name, self.choices))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return str(trial.suggest_int(self.name, self.low, self.high, log=self.log))
        return text(trial.suggest_float(self.name, self.low, self.high, log=self.log))

    def all_values(self) -> Sequence[str | int]:
        """Returns every value, for a grid.

        Raises:
            ConfigurationError: It is a range of floats.
        """
        if self.choices:
            return self.choices
        if isinstance(self.low, int) and isinstance(self.high, int):
            return range(self.low, self.high + 1)
        raise ConfigurationError(
            f"--sampler grid: {self.name} is a range of floats. List the values to try, such as "
            f"--over {self.name}={text(self.low)},{text(self.high)}."
        )


def parse(specification: str) -> Dimension:
    """Parses a value of `--over`.

    Raises:
        ConfigurationError: The syntax is invalid, or the flag cannot be searched.
    """
    flag, _, values = specification.partition("=")
    name = flag.strip().lstrip("-").replace("-", "_")
    if not (name and values):
        raise ConfigurationError(f"--over {specification}: expected {_SYNTAX}.")
    fields = [field for field in TrainConfig.model_fields if field not in _NOT_SEARCHED]
    if not name.startswith(_HYPERPARAMETER) and name not in fields:
        raise ConfigurationError(
            f"--over {specification}: {name} is not a flag of python -m tfdist.train, or cannot be "
            "searched. Use set.NAME for a hyperparameter of the recipe."
            f"{did_you_mean(name, fields)}"
        )
    log = values.startswith("log:")
    ends = values.removeprefix("log:").split(":")
    if len(ends) == 1 and not log:
        return Dimension(name, tuple(value.strip() for value in values.split(",")))
    try:
        low, high = map(_number, ends)
    except ValueError:
        raise ConfigurationError(f"--over {specification}: expected {_SYNTAX}.") from None
    if low >= high or (log and low <= 0):
        raise ConfigurationError(
            f"--over {specification}: expected LOW smaller than HIGH"
            f"{', and LOW larger than 0 with log' if log else ''}."
        )
    return Dimension(name, (), low, high, log)


def flags(values: dict[str, str]) -> list[str]:
    """Returns flags of `python -m tfdist.train` for a mapping from names to values."""
    words = []
    for name, value in values.items():
        if name.startswith(_HYPERPARAMETER):
            words += ["--set", f"{name.removeprefix(_HYPERPARAMETER)}={value}"]
        else:
            words.append(f"--{name.replace('_', '-')}={value}")
    return words


def check_training(words: Sequence[str]) -> None:
    """Checks the flags that are common to all trials.

    Raises:
        ConfigurationError: One of them is set by the search.
    """
    for word in words:
        flag = word.partition("=")[0]
        if flag in ("--run-dir", "--resume", "--evaluate"):
            raise ConfigurationError(
                f"{flag} is not supported: the search chooses and resumes the run folder of each "
                f"trial. Remove {flag}, and set the folder of the study with --folder."
            )


def text(value: float) -> str:
    """Formats a number with four digits. The run uses the formatted value, so it is repeatable."""
    return f"{value:.4g}"


def _number(word: str) -> float:
    try:
        return int(word)
    except ValueError:
        return float(word)
