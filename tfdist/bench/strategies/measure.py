"""Measures one network under each strategy, in turns, each in processes of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfdist.bench.interleave import spread, take_turns
from tfdist.errors import LaunchError
from tfdist.install_horovod import versions
from tfdist.launcher.worker_pool import WorkerPool
from tfdist.plan import step_profile
from tfdist.plan.network import Network
from tfdist.plan.step_profile import Sample
from tfdist.strategies import STRATEGIES

ALONE = "one_device"


class Case(NamedTuple):
    """A strategy's processes, and the devices of each."""

    pool: WorkerPool
    devices: int
    num_replicas: int


def all_strategies(
    network: Network,
    batch: int,
    replicas: int,
    num_steps: int,
    num_rounds: int,
    only: Sequence[str] = tuple(STRATEGIES),
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns a row for each strategy, the fastest first, and why others have none.

    Args:
        network: What is trained.
        batch: Of each replica.
        replicas: Of each strategy but that of one device.
        num_steps: That are timed in a round.
        num_rounds: Of all strategies.
        only: Those to measure, that of one device among them.

    Raises:
        LaunchError: One device does not train.
    """
    absent: dict[str, str] = {}
    ready: dict[str, Callable[[], Sample]] = {}
    with contextlib.ExitStack() as stack:
        for name in only:
            declared = STRATEGIES[name]
            if name == "horovod" and versions.horovod() is None:
                absent[name] = "it is not installed: python -m tfdist.install_horovod"
                continue
            if declared.asynchronous:
                absent[name] = "its workers train at paces of their own, and wait for nobody"
                continue
            is_joined = not declared.by_horovod or versions.horovod() is not None
            in_processes = declared.across_processes and declared.least_devices == 1 and is_joined
            case = _case(name, in_processes, replicas)
            ask = _asking(name, case, network, batch, num_steps)
            try:
                stack.enter_context(case.pool)
                ask()  # compiles
            except LaunchError as error:
                if name == ALONE:
                    raise
                absent[name] = str(error).strip().splitlines()[-1]
                continue
            ready[name] = ask
        samples = take_turns(ready, num_rounds)
    rows = [_row(name, own, batch, replicas) for name, own in samples.items()]
    alone = next(row for row in rows if row["strategy"] == ALONE)["examples_per_s"]["median"]
    for row in rows:
        row["efficiency"] = row["examples_per_s"]["median"] / (row["replicas"] * alone)
    return sorted(rows, key=lambda row: -row["examples_per_s"]["median"]), absent


def _case(name: str, in_processes: bool, replicas: int) -> Case:
    if name == ALONE:
        return Case(step_profile.pool(), 1, 1)
    if in_processes:
        return Case(step_profile.pool(replicas, "processes"), 1, replicas)
    return Case(step_profile.pool(), replicas, replicas)


def _asking(
    name: str, case: Case, network: Network, batch: int, num_steps: int
) -> Callable[[], Sample]:
    def ask() -> Sample:
        samples = case.pool.ask(network, batch * case.num_replicas, name, case.devices, num_steps)
        return max(samples, key=lambda sample: sample.seconds)

    return ask


def _row(name: str, samples: list[Sample], batch: int, replicas: int) -> dict[str, Any]:
    number = 1 if name == ALONE else replicas
    seconds = spread([sample.seconds for sample in samples])
    exchange = min(spread([sample.exchange for sample in samples]).median, seconds.median)
    data = spread([sample.data for sample in samples]).median
    return {
        "strategy": name,
        "replicas": number,
        "ms": spread([1e3 * sample.seconds for sample in samples])._asdict(),
        "examples_per_s": spread([batch * number / s.seconds for s in samples])._asdict(),
        "exchange": exchange / seconds.median,
        "data": data / seconds.median,
        "peak_mb": max(sample.peak_bytes for sample in samples) / 1e6,
    }
