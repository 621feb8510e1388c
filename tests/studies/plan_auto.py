"""`python -m tests.studies.plan_auto`: runs the best two layouts that `tfdist plan auto` chooses.

Devices are logical CPU devices, which share the cores: an example takes a device as many times
longer as there are devices. Their memory is a part of what a step of one device needs, so that the
planner has to choose how to save. The second best is the first one with a longer planned time, on
several devices of another strategy. The two train in turns, and what counts is processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

import tfdist
from tfdist import devices, strategies
from tfdist.console import tables, units
from tfdist.tools.plan import auto
from tfdist.tools.plan.cards import Card
from tfdist.tools.plan.devices import ReplicatedStep
from tfdist.tools.plan.exchange import Link
from tfdist.tools.plan.network import Network

_ROUNDS, _STEPS = 5, 4
#: The second best is the first one whose planned time is this much longer.
_DIFFERENT = 1.005
#: Bytes per second between logical devices, which is a copy in memory.
_COPY = 4e9


class Decision(NamedTuple):
    """A model, its global batch, and the devices with their memory in parts of what it needs."""

    workload: Network
    batch: int
    num_devices: int
    memory: float


DECISIONS = (
    # Memory for the whole batch: one device, or two that send gradients.
    Decision(Network("cnn", (32, 32, 3), 10), 128, 2, 4.0),
    # Too little for the activations: rounds, recomputation or offload.
    Decision(Network("gpt", (64,), 64, settings={"size": "mini"}), 64, 1, 0.6),
    # Too little for Adam's state on each device: what to shard, or a pipeline.
    Decision(Network("mlp", (512,), 10, settings={"units": (1024,) * 6}), 64, 2, 0.8),
)


def main() -> None:
    """Searches, trains the best two of each decision, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.plan_auto")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of decisions, from 0")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    devices.configure(3)
    chosen = [DECISIONS[n] for n in arguments.only or range(len(DECISIONS))]
    results = [compare(decision) for decision in chosen]
    for one in results:
        tables.facts([(name.replace("_", " "), str(value)) for name, value in one.items()])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def compare(decision: Decision) -> dict[str, Any]:
    """Returns the two layouts, and the time of the second in times of the best."""
    workload, batch, num_devices, memory = decision
    alone = auto.Layout("one_device", 1, 1)
    seconds = statistics.median(_trainer(workload, alone, batch)() for _ in range(3))
    room = memory * ReplicatedStep(workload).peak(batch)
    card = Card(auto.RESERVE + room, inner=_COPY)
    cluster = auto.Cluster(card, num_devices, 1, Link(_COPY, 0.0), num_devices * seconds / batch)
    fitting, _ = auto.search(workload, cluster, batch)
    best, *others = auto.of_each_kind(fitting)
    second = next(
        one for one in others
        if one.seconds > _DIFFERENT * best.seconds
        and (num_devices == 1 or one.layout.strategy not in (best.layout.strategy, "one_device"))
    )  # fmt: skip
    trained = [_trainer(workload, one.layout, batch) for one in (best, second)]
    times = [(trained[0](), trained[1]()) for _ in range(_ROUNDS)]
    return {
        "model": f"{workload.model}, batch {batch}",
        "devices": f"{num_devices} of {units.format_bytes(room)}",
        "best": " ".join(best.layout.flags()),
        "second": " ".join(second.layout.flags()),
        "planned": round(second.seconds / best.seconds, 2),
        "measured": round(statistics.median(other / one for one, other in times), 2),
        "milliseconds": [
            round(1e3 * statistics.median(run), 1) for run in zip(*times, strict=True)
        ],
    }


def _trainer(workload: Network, layout: auto.Layout, batch: int) -> Callable[[], float]:
    """Returns what trains a few steps and returns the processor time of one; it is warmed up."""
    of_strategy, of_trainer = layout.options()
    strategy = strategies.create(layout.strategy, layout.num_cards, **of_strategy)
    trainer = tfdist.Trainer(workload.build, strategy, steps_per_call=1, verify="off", **of_trainer)
    data = tf.data.Dataset.from_tensors(workload.batch(batch)).repeat()

    def run() -> float:
        began = time.process_time()
        trainer.fit(data, steps_per_epoch=_STEPS, verbose=0)
        return (time.process_time() - began) / _STEPS

    run()
    return run


if __name__ == "__main__":
    main()
