"""What a process of `benchmarks link` writes on its output: one line of JSON per answer.

First the facts about the gradients, then a measurement for each name on its input. Imports no
engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.tools.bench.workloads import Workload

#: Measurements besides steps: a step that exchanges nothing, and a sum of all gradients.
COMPUTE, SEND = "compute", "send"
#: Steps: with replicated weights, with sharded gradients (ZeRO 2), and with sharded weights (ZeRO
#: 3).
AT_ONCE, IN_BUCKETS = "at once", "in buckets"
GRADIENTS, PARAMETERS = "sharded gradients", "sharded parameters"

#: Sums of a measurement.
NUM_SENDS = 3
#: Eight equal layers with 8 million weights in total, whose gradients are computed one by one.
NETWORK = Workload("mlp", {"units": (1024,) * 8}, (1024,), "float32", 1024, 4)


class Times(NamedTuple):
    """Milliseconds of wall-clock time, and of processor time of all threads of the process."""

    ms: float
    cpu_ms: float


def timed(run: Callable[[], Any], times: int) -> Times:
    """Returns the mean time of a call."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(times):
        run()
    cpu, seconds = time.process_time() - cpu_began, time.perf_counter() - began
    return Times(1e3 * seconds / times, 1e3 * cpu / times)


def use_own_core(rank: int) -> None:
    """Restricts this process to one core, which differs from that of the other rank."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})


def announce() -> None:
    """Tells the benchmark that this process has started."""
    print("started", flush=True)


def serve(measures: Mapping[str, Callable[[], Times]], buckets: Sequence[int]) -> None:
    """Warms up, prints the facts about the gradients, and measures what each line asks for.

    Args:
        measures: Measurements by name.
        buckets: Bytes of each gradient bucket, in their order.
    """
    for measure in measures.values():
        measure()
    total = sum(buckets)
    facts = {"bytes": total, "buckets": len(buckets), "last_bucket": buckets[-1] / total}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(measures[line.strip()]()), flush=True)
