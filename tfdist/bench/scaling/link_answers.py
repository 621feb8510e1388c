"""What a process of `bench scaling --link` says: what there is to send, and how long things take.

A line a time on its output; on its input the names of what to measure. Imports no engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: What is measured beside steps: a step that exchanges nothing, and a sum of all gradients.
COMPUTE, SEND = "compute", "send"
#: Steps: with whole copies, and with gradients (ZeRO 2) or weights, too (ZeRO 3), in parts.
AT_ONCE, IN_BUCKETS = "at once", "in buckets"
GRADIENTS, PARAMETERS = "sharded gradients", "sharded parameters"

#: Sums of a measurement.
NUM_SENDS = 3


class Taken(NamedTuple):
    """Milliseconds by the clock, and of the processor by all threads of the process."""

    ms: float
    cpu_ms: float


def timed(run: Callable[[], Any], times: int) -> Taken:
    """Returns what a call takes, on average over some of them."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(times):
        run()
    cpu, seconds = time.process_time() - cpu_began, time.perf_counter() - began
    return Taken(1e3 * seconds / times, 1e3 * cpu / times)


def take_own_core(rank: int) -> None:
    """Keeps this process on one core, another than that of the other rank."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})


def say_here() -> None:
    """Tells the benchmark that the others may look for this process."""
    print("here", flush=True)


def serve(measures: Mapping[str, Callable[[], Taken]], buckets: Sequence[int]) -> None:
    """Warms up, says what there is to send, and measures what each line asks for.

    Args:
        measures: By name.
        buckets: Bytes of the gradients that cross together, in their order.
    """
    for measure in measures.values():
        measure()
    total = sum(buckets)
    facts = {"bytes": total, "buckets": len(buckets), "last_bucket": buckets[-1] / total}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(measures[line.strip()]()), flush=True)
