"""Measures all engines, in turns, and says what came out as plain data."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.bench.allreduce.engines import REPLICAS
from tfdist.bench.interleave import ratio, spread, take_turns
from tfdist.launcher.worker_pool import WorkerPool

COPY = "memory copy"

#: Bytes that a measurement of small tensors moves, about, so that it is more than one sum.
_BYTES_A_ROUND = 1 << 24
_MOST_REPEATS = 32


def size(pools: Mapping[str, WorkerPool], num_bytes: int, num_rounds: int) -> dict[str, Any]:
    """Returns, for a size, each engine's times, bus bandwidths and ratios to a memory copy's.

    Args:
        pools: The engines' workers.
        num_bytes: Of the tensor, on each replica.
        num_rounds: Measurements of each.
    """
    repeats = max(1, min(_MOST_REPEATS, _BYTES_A_ROUND // num_bytes))
    contenders = {
        name: functools.partial(_slowest, pool, num_bytes, repeats) for name, pool in pools.items()
    }
    contenders[COPY] = functools.partial(_copy, num_bytes, repeats)
    seconds = take_turns(contenders, num_rounds)
    return {
        "bytes": num_bytes,
        "repeats": repeats,
        "rounds": num_rounds,
        "engines": {
            name: _result(name, own, seconds[COPY], num_bytes) for name, own in seconds.items()
        },
    }


def _slowest(pool: WorkerPool, num_bytes: int, repeats: int) -> float:
    """The time of the worker that waits longest."""
    return max(pool.ask(num_bytes, repeats))


def _copy(num_bytes: int, repeats: int) -> float:
    """The time of a copy from memory to memory, in this process."""
    # Both written once: the pages of np.zeros do not exist yet.
    source, to, times = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8), []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(to, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _result(name: str, own: Sequence[float], copy: Sequence[float], num_bytes: int) -> dict:
    # What each replica has to send, and to receive, in the best of algorithms: 2(n-1)/n of it.
    moved = num_bytes * (1 if name == COPY else 2 * (REPLICAS - 1) / REPLICAS)
    bandwidths, copies = [[b / s / 1e9 for s in of] for b, of in ((moved, own), (num_bytes, copy))]
    return {
        "ms": spread([1e3 * s for s in own])._asdict(),
        "gb_per_s": spread(bandwidths)._asdict(),
        "of_memory_copy": ratio(bandwidths, copies)._asdict(),
        "samples_s": list(own),
    }
