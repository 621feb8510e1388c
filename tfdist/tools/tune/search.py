"""`tfdist tune search`: tries values of flags with Optuna, one run for each trial."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from tfdist.config import TrainConfig
from tfdist.console import tables
from tfdist.errors import ConfigurationError, LaunchError, MissingError, did_you_mean

if TYPE_CHECKING:
    import optuna

DESCRIPTION = "searches the best values of any flags with Optuna, one run per trial; can be resumed"

SAMPLERS = ("tpe", "random", "grid")
_SHOWN = 10
#: Parts of metric names from which `--mode auto` infers the direction.
_HIGHER_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "iou", "top_", "psnr", "ssim", "r2")
_LOWER_IS_BETTER = ("loss", "error", "mse", "mae", "entropy", "perplexity", "time", "seconds")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--over", action="append", required=True, metavar="FLAG=VALUES",
        help="a flag to search, may be repeated: batch_size=32,64 or weight_decay=0:0.1 or "
        "learning_rate=log:1e-4:1e-1; set.NAME=... for a hyperparameter of the recipe",
    )  # fmt: skip
    parser.add_argument(
        "--trials", type=PositiveInt, default=20, metavar="N", help="number of runs in the study"
    )
    parser.add_argument(
        "--metric",
        default="val_loss",
        metavar="NAME",
        help="metric to optimize, as of the last epoch",
    )
    parser.add_argument(
        "--mode", choices=["auto", "min", "max"], default="auto",
        help="whether to minimize or maximize the metric; auto: inferred from its name",
    )  # fmt: skip
    parser.add_argument(
        "--pruning", action="store_true",
        help="stop a run whose metric is worse than the median of earlier runs at the same epoch",
    )  # fmt: skip
    parser.add_argument(
        "--folder", default="study", metavar="DIR",
        help="folder of the study and its runs; run the same command again to resume it",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=PositiveInt, default=1, metavar="N", help="number of runs at the same time"
    )
    parser.add_argument(
        "--gpus-per-trial", type=NonNegativeInt, default=0, metavar="N",
        help="number of GPUs for each run; 0: all GPUs are visible to every run",
    )  # fmt: skip
    parser.add_argument(
        "--num-workers", type=PositiveInt, default=1, metavar="N",
        help="worker processes of each run, started by python -m tfdist.launch",
    )  # fmt: skip
    parser.add_argument(
        "--sampler", choices=list(SAMPLERS), default="tpe",
        help="how values are chosen; grid: all combinations, without ranges of floats",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=NonNegativeInt, default=0, metavar="N", help="seed of the sampler"
    )


def run(
    over: Sequence[str],
    trials: int,
    metric: str,
    mode: str,
    pruning: bool,
    folder: str,
    jobs: int,
    gpus_per_trial: int,
    num_workers: int,
    sampler: str,
    seed: int,
    training: Sequence[str],
) -> None:
    """Searches and prints the best runs; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag is invalid, or the folder contains another study.
        LaunchError: The first runs all fail, or none is complete in the end.
        MissingError: Optuna is not installed.
    """
    dimensions = [parse(specification) for specification in over]
    check_training(training)
    maximize = _should_maximize(metric, mode)
    try:
        from tfdist.tools.tune import study as studies
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise MissingError("Optuna is not installed: pip install optuna.") from error

    study = studies.Study(
        Path(folder), dimensions, metric, list(training),
        maximize=maximize, sampler=sampler, pruning=pruning, seed=seed,
    )  # fmt: skip
    program = ["-m", "tfdist.train"]
    if num_workers > 1:
        program = ["-m", "tfdist.launch", "--num-workers", str(num_workers)]
    studies.search(study, [sys.executable, *program], trials, jobs, gpus_per_trial)
    _show(study, metric, ["python", *program, *training])


def _should_maximize(metric: str, mode: str) -> bool:
    """Returns whether higher values of a metric are better.

    Raises:
        ConfigurationError: The direction cannot be inferred from the name.
    """
    if mode != "auto":
        return mode == "max"
    higher, lower = (
        any(part in metric for part in parts) for parts in (_HIGHER_IS_BETTER, _LOWER_IS_BETTER)
    )
    if higher == lower:
        raise ConfigurationError(
            f"--metric {metric}: cannot infer whether higher is better. Add --mode max or "
            "--mode min."
        )
    return higher


def _show(study: Any, metric: str, command: Sequence[str]) -> None:
    """Prints the best runs, and the command to repeat the best one.

    Raises:
        LaunchError: No run is complete.
    """
    results = study.results()
    names = list(dict.fromkeys(name for result in results for name in result.values))
    rows = [
        [result.folder.name, *(result.values.get(name, "") for name in names),
         "" if result.value is None else f"{result.value:.4f}", result.state]
        for result in results[:_SHOWN]
    ]  # fmt: skip
    ended = [result for result in results if result.state == "complete"]
    tables.numbers(
        ["run", *names, metric, "state"],
        rows,
        title=f"{len(ended)} complete runs in {study.folder}",
    )
    if not ended:
        raise LaunchError(f"no run of {study.folder} is complete. Its logs have the reasons.")
    words = shlex.join([*command, *flags(ended[0].values)])
    print(f"The best run is {ended[0].folder}. To repeat it:\n    {words}")


# ---- the search space ----


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
