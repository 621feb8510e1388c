"""`tfdist tune search`: tries values of flags with Optuna, one run for each trial."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from tfdist.console import tables
from tfdist.errors import ConfigurationError, LaunchError, MissingError
from tfdist.tools.tune import space

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
    dimensions = [space.parse(specification) for specification in over]
    space.check_training(training)
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
    """Returns whether higher values of a metric are better."""
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
    """Prints the best runs, and the command to repeat the best one."""
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
    words = shlex.join([*command, *space.flags(ended[0].values)])
    print(f"The best run is {ended[0].folder}. To repeat it:\n    {words}")
