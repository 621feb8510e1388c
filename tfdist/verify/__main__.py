"""`python -m tfdist.verify`: whether a strategy gives the numbers of one device on this machine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from tfdist import cluster
from tfdist.config import StrategyOptions
from tfdist.console import command
from tfdist.console.settings_file import Setting
from tfdist.errors import ConfigurationError, TfdistError
from tfdist.run import flags, settings
from tfdist.strategies import STRATEGIES
from tfdist.verify import report
from tfdist.verify.attempt import attempt
from tfdist.verify.verdict import Verdict

ALL = "all"
_DESCRIPTION = "Trains a small network under a strategy and compares it with plain Keras's."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 where all passed, else 1; 130: interrupted."""
    return command.run(lambda: int(not _verify(_parse(arguments))))


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = command.parser("python -m tfdist.verify", _DESCRIPTION)
    parser.add_argument(
        "--strategy", choices=[*STRATEGIES, ALL], default=ALL, help="which; left out: all, in turns"
    )
    parser.add_argument(
        "--num-workers",
        type=PositiveInt,
        metavar="N",
        help="start that many processes; left out: this one, or those that mpirun or srun started",
    )
    parser.add_argument(
        "--devices", type=PositiveInt, metavar="N", help="of each process; left out: the strategy's"
    )
    options = parser.add_argument_group("Options of strategies")
    for name, field in StrategyOptions.model_fields.items():
        flags.add_flag(options, name, field)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout", type=PositiveInt, default=300, metavar="SECONDS", help="for each strategy"
    )
    chosen = command.parse(parser, arguments)
    if cluster.discover().size > 1 and (chosen.num_workers or chosen.strategy == ALL):
        raise ConfigurationError(
            f"this is one of {cluster.discover().size} processes already: name one --strategy, "
            "and leave --num-workers out."
        )
    if chosen.strategy == ALL and _options(chosen):
        raise ConfigurationError(
            f"{', '.join(_options(chosen))}: options are of one strategy; name it with --strategy."
        )
    return chosen


def _options(chosen: Namespace) -> dict[str, Any]:
    """Returns the strategy's options that are given.

    Raises:
        ConfigurationError: A value that does not fit.
    """
    given = {
        name: Setting(chosen[name], flags.flag(name))
        for name in StrategyOptions.model_fields
        if chosen.get(name) is not None
    }
    values = settings.checked(StrategyOptions, given, "option")
    return {name: getattr(values, name) for name in given}


def _verify(chosen: Namespace) -> bool:
    """Makes the trials, prints what came of them, and tells whether nothing is wrong."""
    outcomes: dict[str, Verdict | TfdistError] = {}
    for name in STRATEGIES if chosen.strategy == ALL else [chosen.strategy]:
        outcomes[name] = outcome = _outcome(name, chosen)
        if chosen.strategy != ALL and isinstance(outcome, TfdistError):
            raise outcome
        if cluster.is_chief() and not chosen.json:
            print(report.as_text(name, outcome), flush=True)
    if cluster.is_chief() and chosen.json:
        print(report.as_json(outcomes))
    return all(map(report.healthy, outcomes.values()))


def _outcome(name: str, chosen: Namespace) -> Verdict | TfdistError:
    """Makes a trial, in this process or in others."""
    from tfdist.launcher.notebook import notebook_launch

    devices = chosen.devices or (1 if STRATEGIES[name].asynchronous else None)
    options = _options(chosen)
    if chosen.strategy != ALL and not chosen.num_workers:
        return attempt(name, devices, chosen.timeout, **options)
    num_workers = chosen.num_workers or 2
    if not STRATEGIES[name].across_processes:
        if chosen.strategy != ALL and num_workers > 1:
            return ConfigurationError(
                f"strategy {name!r} is of one process: leave --num-workers out, or give --devices."
            )
        num_workers = 1
    try:
        make = functools.partial(attempt, name, devices, chosen.timeout, **options)
        return notebook_launch(make, num_workers)
    except TfdistError as error:
        return error


if __name__ == "__main__":
    sys.exit(main())
