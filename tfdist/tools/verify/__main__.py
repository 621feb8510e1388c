"""`tfdist verify`: checks that a strategy matches one device on this machine."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from tfdist import cluster, strategies
from tfdist.cluster.deadline import deadline
from tfdist.config import StrategyOptions
from tfdist.console import command
from tfdist.console.settings_file import Setting
from tfdist.errors import ConfigurationError, TfdistError
from tfdist.run import flags
from tfdist.strategies import STRATEGIES, current_name
from tfdist.tools.verify import results
from tfdist.tools.verify.results import Verdict

ALL = "all"
_DESCRIPTION = "Trains a small network under a strategy and compares it with plain Keras."


#: Number of steps of each loop of a script that are compared.
_STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if all strategies passed, 1 otherwise, 130 after an interrupt."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0].endswith(".py"):
        return command.run(lambda: _verify_script(given))
    return command.run(lambda: int(not _verify(_parse(arguments))))


def _verify_script(arguments: list[str]) -> int:
    """Runs a script up to its first trainer's first step, which is compared with plain Keras."""
    from tfdist.loops.self_check import SelfCheck
    from tfdist.upstream.patching import replaced

    def verify_and_exit(check: SelfCheck, loop: Any, data: Any, run: Any) -> None:
        line = check.verify(loop, data, run, _STEPS)
        if cluster.is_chief():
            print(line, flush=True)
        raise SystemExit(int(not line.startswith("verified")))

    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    with replaced(SelfCheck, "at_first_use", verify_and_exit):
        runpy.run_path(arguments[0], run_name="__main__")
    raise ConfigurationError(f"{arguments[0]} trains nothing with tfdist.Trainer.")


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = command.parser("tfdist verify", _DESCRIPTION)
    parser.add_argument(
        "--strategy",
        type=current_name,
        choices=[*STRATEGIES, ALL],
        default=ALL,
        help="strategy to check; all: one after the other",
    )
    parser.add_argument(
        "--num-workers",
        type=PositiveInt,
        metavar="N",
        help="number of processes to start (default: this one, or those of mpirun or srun)",
    )
    parser.add_argument(
        "--devices",
        type=PositiveInt,
        metavar="N",
        help="devices of each process (default: the strategy's)",
    )
    options = parser.add_argument_group("Options of the strategies")
    for name, field in StrategyOptions.model_fields.items():
        flags.add_flag(options, name, field)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout",
        type=PositiveInt,
        default=300,
        metavar="SECONDS",
        help="time limit for each strategy",
    )
    chosen = command.parse(parser, arguments)
    if cluster.discover().size > 1 and (chosen.num_workers or chosen.strategy == ALL):
        raise ConfigurationError(
            f"this process is already one of {cluster.discover().size}. Choose one --strategy "
            "and remove --num-workers."
        )
    if chosen.strategy == ALL and _options(chosen):
        raise ConfigurationError(
            f"{', '.join(_options(chosen))}: these options need a single strategy. Choose it with "
            "--strategy."
        )
    return chosen


def _options(chosen: Namespace) -> dict[str, Any]:
    """Returns the strategy's options on the command line.

    Raises:
        ConfigurationError: An option has an invalid value.
    """
    given = {
        name: Setting(chosen[name], flags.flag(name))
        for name in StrategyOptions.model_fields
        if chosen.get(name) is not None
    }
    values = flags.checked(StrategyOptions, given, "option")
    return {name: getattr(values, name) for name in given}


def _verify(chosen: Namespace) -> bool:
    outcomes: dict[str, Verdict | TfdistError] = {}
    for name in STRATEGIES if chosen.strategy == ALL else [chosen.strategy]:
        outcomes[name] = outcome = _outcome(name, chosen)
        if chosen.strategy != ALL and isinstance(outcome, TfdistError):
            raise outcome
        if cluster.is_chief() and not chosen.json:
            print(results.as_text(name, outcome), flush=True)
    if cluster.is_chief() and chosen.json:
        print(results.as_json(outcomes))
    return all(map(results.healthy, outcomes.values()))


def _outcome(name: str, chosen: Namespace) -> Verdict | TfdistError:
    """Runs a trial, in this process or in new ones."""
    from tfdist.cluster.launcher.notebook import notebook_launch

    devices = chosen.devices or (1 if STRATEGIES[name].asynchronous else None)
    options = _options(chosen)
    if chosen.strategy != ALL and not chosen.num_workers:
        return attempt(name, devices, chosen.timeout, **options)
    num_workers = chosen.num_workers or 2
    if not STRATEGIES[name].across_processes:
        if chosen.strategy != ALL and num_workers > 1:
            return ConfigurationError(
                f"strategy {name!r} runs in one process. Use --devices instead of --num-workers."
            )
        num_workers = 1
    try:
        trial = functools.partial(attempt, name, devices, chosen.timeout, **options)
        return notebook_launch(trial, num_workers)
    except TfdistError as error:
        return error


def attempt(
    name: str, devices: int | None, seconds: float, **options: Any
) -> Verdict | TfdistError:
    """Runs a trial, and exits the process if it takes longer than `seconds`.

    Returns:
        The verdict, or the error that prevented the trial. The error is returned, not raised, so
        that only one of several workers prints it.
    """
    with _time_limit(seconds, name):
        try:
            strategy = strategies.create(name, devices, **options)
            from tfdist.tools.verify.trial import judge

            return judge(strategy)
        except TfdistError as error:
            return error


@contextmanager
def _time_limit(seconds: float, name: str) -> Iterator[None]:
    """Exits this process if the block takes too long. An exception cannot interrupt collectives."""

    def give_up() -> None:
        message = (
            f"error: {name} did not finish within {seconds} s. Check that every worker is running "
            "and can reach the others, or increase --timeout."
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(1)

    with deadline(seconds, give_up):
        yield


if __name__ == "__main__":
    sys.exit(main())
