"""The flags of `python -m tfdist.bench step`, and what it does. Imports no TensorFlow at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench.step.workloads import WORKLOADS

if TYPE_CHECKING:
    from tfdist.bench.step.contenders import Case

DESCRIPTION = "time per training step, beside plain Keras's and a loop written by hand"
_SMOKE_ROUNDS = 2


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(WORKLOADS),
        default=list(WORKLOADS),
        help="what to train; left out: all",
    )
    parser.add_argument(
        "--what",
        nargs="+",
        choices=["fit", "evaluate", "predict"],
        default=["fit"],
        help="which of the trainer's methods",
    )
    parser.add_argument(
        "--replicas",
        nargs="+",
        type=PositiveInt,
        default=[1, 2],
        metavar="N",
        help="1: one device; from 2 on: mirrored",
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=7, metavar="N", help="measurements of each contender"
    )
    parser.add_argument(
        "--steps",
        type=PositiveInt,
        metavar="N",
        help="steps of a measurement; left out: some tenths of a second",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny batches and few steps, to see that it works"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="instead of comparing times, show where a step's time goes, ours and by hand",
    )


def run(
    models: Sequence[str],
    what: Sequence[str],
    replicas: Sequence[int],
    rounds: int,
    steps: int | None,
    json: str | None,
    smoke: bool,
    profile: bool,
) -> None:
    """Measures and prints tables; the arguments are the flags.

    Raises:
        DeviceError: Fewer devices than replicas.
    """
    from tfdist import devices
    from tfdist.bench.machine import OthersLoad
    from tfdist.bench.step import measure, report, trace

    devices.configure(max(replicas))  # before the first strategy starts TensorFlow
    cases = (_case(model, number, steps, smoke) for model in models for number in replicas)
    if profile:
        for case in cases:
            report.show_trace(case, trace.compare(case))
        return
    load, results = OthersLoad(), []
    for case in cases:
        for method in what:
            results.append(measure.case(case, _SMOKE_ROUNDS if smoke else rounds, method))
            report.show(results[-1])
    report.conclude(results, load.fraction(), json)


def _case(model: str, num_replicas: int, steps: int | None, smoke: bool) -> Case:
    """A workload on some replicas."""
    from tfdist import strategies
    from tfdist.bench.step.contenders import Case

    workload = WORKLOADS[model].tiny() if smoke else WORKLOADS[model]
    name = "one_device" if num_replicas == 1 else "mirrored"
    strategy = strategies.create(name, num_replicas)
    return Case(model, workload, strategy, steps or workload.num_steps)
