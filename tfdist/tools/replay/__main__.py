"""`tfdist replay`: repeats the steps of a run up to one of them, from the nearest checkpoint."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from jsonargparse.typing import NonNegativeInt, PositiveInt

from tfdist.config import Spread, StrategyOptions, TrainConfig
from tfdist.console import command, tables
from tfdist.errors import ConfigurationError
from tfdist.strategies import STRATEGIES, current_name

_DESCRIPTION = (
    "Repeats a step of a run, on this machine: compares its numbers with those of the run, and "
    "shows the gradients and the records of its batch."
)
#: Settings of the run that say where it ran, not what it computed.
_PLACE = {*Spread.model_fields, *StrategyOptions.model_fields} - {
    "sync_batch_norm",
    "replica_random",
}


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and returns its exit code: 1 for an error, otherwise 0."""
    parser = command.parser("tfdist replay", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "--step", type=PositiveInt, required=True, metavar="N", help="the step, counted from 1"
    )
    parser.add_argument(
        "--strategy",
        type=current_name,
        choices=list(STRATEGIES),
        default="one_device",
        help="the strategy to repeat the steps with",
    )
    parser.add_argument(
        "--devices", type=PositiveInt, metavar="N", help="number of devices of the strategy"
    )
    parser.add_argument(
        "--worst", type=NonNegativeInt, default=5, metavar="N", help="rows of the batch to show"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="PNG file for the images of these rows; default: none"
    )
    given = command.parse(parser, arguments)
    run = Path(given.run)
    tables.check_path(given.picture, ".png") if given.picture else None
    try:
        saved = yaml.safe_load((run / "config.yaml").read_bytes())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{run} is not a run folder: {error}") from None
    from tfdist.tools.replay import steps  # imported here to keep `--help` fast

    with tempfile.TemporaryDirectory() as folder:
        fields = TrainConfig.model_fields.keys() - _PLACE
        values = {name: value for name, value in saved.items() if name in fields}
        if given.strategy == "one_device":  # whose BatchNorm sees all rows
            values.pop("sync_batch_norm", None)
        values |= {
            "strategy": given.strategy, "devices": given.devices, "verify": "off", "verbose": 0,
            "run_dir": folder, "resume": "never", "checkpoint_every": 10**12, "keep_best": None,
            "on_nan": "warn", "on_spike": "off", "max_time": None, "logger": [], "export": [],
        }  # fmt: skip
        config = TrainConfig(**values)
        replayed = steps.replay(run, config, given.step)
    steps.show(replayed, given.worst, given.picture)


if __name__ == "__main__":
    sys.exit(main())
