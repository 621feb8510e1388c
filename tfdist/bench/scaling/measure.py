"""Measures all engines on one model, in turns, and says what came out as plain data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.bench.interleave import ratio, spread, take_turns
from tfdist.bench.scaling.engines import BY_HAND, ENGINES, OURS
from tfdist.bench.step.workloads import Workload
from tfdist.errors import LaunchError
from tfdist.launcher.worker_pool import WorkerPool

#: What a step of tfdist may take at most, as a ratio to one of a loop by hand on the same engine.
HAND_GOAL = 1.05
#: Whose efficiency is the goal of the others.
RIVAL = "PyTorch, Gloo"

#: Milliseconds per step of the slowest worker, by engine and way to train, in order of the rounds.
Times = Mapping[tuple[str, str], Sequence[float]]


def model(
    name: str, workload: Workload, pools: Mapping[str, WorkerPool], num_rounds: int
) -> dict[str, Any]:
    """Returns images per second, efficiency and the fraction of exchange by engine and way.

    Args:
        name: Out of `MODELS`.
        workload: That model's, with the batch of one worker.
        pools: The engines' workers.
        num_rounds: Measurements of each.
    """
    ready, failed = {}, {}
    for engine, pool in pools.items():
        for way in ENGINES[engine].ways:
            ask = functools.partial(_slowest, pool, name, way, workload.num_steps)
            try:
                ask()  # compiles
                ready[engine, way] = ask
            except LaunchError as error:
                why = str(error).splitlines()[-1]
                failed[engine, way] = {"engine": engine, "way": way, "error": why}
    times: Times = take_turns(ready, num_rounds)
    rows = [_row(key, times, workload.batch_size * pools[key[0]].num_workers) for key in times]
    _judge(rows)
    return {
        "model": name,
        "batch_per_worker": workload.batch_size,
        "steps": workload.num_steps,
        "rounds": num_rounds,
        "rows": rows + list(failed.values()),
    }


def _slowest(pool: WorkerPool, *question: Any) -> float:
    return max(pool.ask(*question))


def _row(key: tuple[str, str], times: Times, num_images: int) -> dict[str, Any]:
    """The numbers of one engine and way to train."""
    engine, way = key
    own, (_, _, apart, alone) = times[key], ENGINES[engine]
    row: dict[str, Any] = {
        "engine": engine,
        "way": way,
        "ms": spread(own)._asdict(),
        "images_per_s": spread([1e3 * num_images / ms for ms in own])._asdict(),
        "samples_ms": list(own),
    }
    if (base := _like(times, alone, way)) and engine != alone:
        row["efficiency"] = ratio(base, own)._asdict()  # as many images a process
    if (base := _like(times, apart, way)) and engine not in (apart, alone):
        fractions = [1 - without / whole for without, whole in zip(base, own, strict=True)]
        row["exchange"] = spread(fractions)._asdict()
    if way == OURS and (engine, BY_HAND) in times:
        row["to_by_hand"] = ratio(own, times[engine, BY_HAND])._asdict()
    return row


def _like(times: Times, engine: str, way: str) -> Sequence[float] | None:
    """The times of another engine, trained in the same way where it is."""
    return times.get((engine, way)) or times.get((engine, OURS))


def _judge(rows: Sequence[dict[str, Any]]) -> None:
    """Says which goals are met."""
    rival = next((r["efficiency"]["median"] for r in rows if r["engine"] == RIVAL), None)
    for row in rows:
        if hand := row.get("to_by_hand"):
            hand |= {"goal": HAND_GOAL, "met": hand["median"] <= HAND_GOAL}
        if rival is not None and "exchange" in row and row["way"] == OURS:
            own = row["efficiency"]
            own |= {"goal": rival, "met": own["median"] >= rival}
