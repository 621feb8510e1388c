"""`python -m benchmarks pipeline`: a pipeline's speed-up, compared with what its bubble leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.tools.bench import harness

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

DESCRIPTION = "speed-up of pipeline stages over one device, compared with the ideal"

#: The part of the ideal speed-up to reach.
GOAL = 0.9
_ROWS, _LAYERS = 32, 4


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--stages", nargs="+", type=Literal[2, 4], default=[2, 4], metavar="N",
        help="numbers of stages: 2, 4 or both",
    )  # fmt: skip
    parser.add_argument(
        "--micro-batches", nargs="+", type=PositiveInt, default=[1, 2, 4, 8, 16, 32], metavar="M",
        help="numbers of micro-batches",
    )  # fmt: skip
    parser.add_argument(
        "--orders", nargs="+", type=Literal["gpipe", "1f1b", "interleaved", "zb"],
        default=["gpipe", "1f1b"], metavar="ORDER",
        help="gpipe, 1f1b, interleaved (two stages per device), zb, or several. With zb, the "
        "gradients of inputs and weights wait apart in all of them.",
    )  # fmt: skip
    parser.add_argument(
        "--step-ms", type=PositiveInt, default=480, help="milliseconds of a step on one device"
    )
    harness.add_arguments(parser, steps=5, rounds=3)


def run(
    stages: Sequence[int],
    micro_batches: Sequence[int],
    orders: Sequence[str],
    step_ms: int,
    steps: int,
    rounds: int,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags."""
    if smoke:
        stages, micro_batches, orders, step_ms, steps, rounds = [2], [2], ["1f1b"], 24, 2, 1
    results = measure(stages, micro_batches, orders, step_ms, steps, rounds)
    output.show(
        ("stages", "order", "micro-batches", "ideal", "speed-up", "of the ideal"),
        [_cells(result) for result in results],
        f"layers that wait, {step_ms} ms per step on one device; goal: {GOAL:.1f} of the ideal",
    )
    output.conclude(results)


def measure(
    stages: Sequence[int],
    micro_batches: Sequence[int],
    orders: Sequence[str],
    step_ms: int,
    steps: int,
    num_rounds: int,
) -> list[dict[str, Any]]:
    """Returns the speed-up of each number of stages and micro-batches in each order.

    Args:
        stages: Numbers of stages; the network has four layers, or one for each stage.
        micro_batches: Numbers of micro-batches.
        orders: `"gpipe"`, `"1f1b"`, `"interleaved"` and `"zb"`.
        step_ms: Milliseconds of a step on one device.
        steps: Steps of a measurement.
        num_rounds: Measurements of each.
    """
    import tensorflow as tf

    from benchmarks.waiting_layers import NUM_THREADS, network
    from tfdist import devices
    from tfdist.strategies import create
    from tfdist.strategies.pipeline.schedule import planned_speed_up
    from tfdist.strategies.pipeline.strategy import Pipeline

    tf.config.threading.set_inter_op_parallelism_threads(NUM_THREADS)
    devices.configure(max(stages))

    def build(num_stages: int) -> Any:
        return network(max(_LAYERS, num_stages), step_ms / _ROWS, "zb" in orders)

    alone = _prepare(functools.partial(build, 1), create("one_device", 1), steps)
    results = []
    for n, order, m in ((n, order, m) for n in stages for order in orders for m in micro_batches):
        strategy = Pipeline(n, micro_batches=m, order=order)
        pipeline = _prepare(functools.partial(build, strategy.num_stages), strategy, steps)
        contenders = {"one device": alone, "pipeline": pipeline}
        samples = harness.run_in_turns(contenders, num_rounds)
        shares = [1 / strategy.num_stages] * strategy.num_stages
        ideal = planned_speed_up(shares, m, order, n)
        speed_up = harness.ratio(samples["one device"], samples["pipeline"])
        results.append(
            {
                "stages": n,
                "order": order,
                "micro_batches": m,
                "ideal": ideal,
                "speed_up": speed_up,
                "of_ideal": speed_up["median"] / ideal,
                "step_ms": harness.spread([1e3 * t for t in samples["pipeline"]]),
                "samples_s": samples,
            }
        )
    return results


def _prepare(build: Callable[[], Any], strategy: Strategy, steps: int) -> Callable[[], float]:
    """Returns a function that runs steps and returns the seconds of one; it is warmed up."""
    from tfdist.tools.plan.step_profile import StepTimes
    from tfdist.trainer import Trainer

    trainer = Trainer(build, strategy=strategy, steps_per_call=1)
    rows = np.ones((_ROWS * (steps + 1), 1), "float32")

    def measure_step() -> float:
        times = StepTimes()
        trainer.fit(rows, rows, batch_size=_ROWS, shuffle=False, verbose=0, callbacks=[times])
        return times.seconds()

    measure_step()
    return measure_step


def _cells(result: dict[str, Any]) -> list[str]:
    return [
        str(result["stages"]),
        result["order"],
        str(result["micro_batches"]),
        f"{result['ideal']:.2f}",
        harness.as_text(result["speed_up"]),
        f"{result['of_ideal']:.2f}",
    ]
