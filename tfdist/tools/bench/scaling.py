"""`tfdist bench scaling`: compares two processes, on one core each, with one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser

from pipelines.cores import num_bound_cores
from tfdist import cluster
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.console import tables
from tfdist.errors import DeviceError, LaunchError
from tfdist.tools.bench import harness
from tfdist.tools.bench.allreduce import missing
from tfdist.tools.bench.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    pass

DESCRIPTION = "compares two processes, on one core each, with one process, by engine"

OURS, BY_HAND = "tfdist", "by hand"
#: Goal: tfdist's step time relative to that of a hand-written loop with the same engine.
HAND_GOAL = 1.05
#: The engine whose efficiency is the goal for the others.
RIVAL = "PyTorch, Gloo"
#: Workloads with the batch size of one worker.
MODELS = {
    # Much compute time and 120,000 weights.
    "cnn": dataclasses.replace(WORKLOADS["cnn"], input_shape=(32, 32, 1), num_steps=8),
    # Little compute time and 25 million weights, with 100 MB of gradients.
    "dense": Workload(
        "mlp", {"units": (4096, 4096)}, (2048,), "float32", 64, 3, {"units": (64, 64)}
    ),
}
_SMOKE_ROUNDS = 2
_NOTE = (
    f"{harness.NOTE} Each process has one core and a per-replica batch. 'efficiency': images per "
    "second and process, relative to a single process. 'exchange': fraction of a step's time "
    "beyond that of two processes without communication. 'relative': tfdist's time relative to "
    "that of a hand-written loop with the same engine."
)

#: In a worker: takes a model, a way to train and a number of steps. Returns milliseconds per step.
Measure = Callable[[str, str, int], float]
#: Milliseconds per step of the slowest worker, by engine and way, in the order of the rounds.
Times = Mapping[tuple[str, str], Sequence[float]]


class Engine(NamedTuple):
    """The workers of an engine, and the engines to compare with.

    Attributes:
        start: Starts the workers. The argument is whether to use tiny models.
        ways: Ways to train: `OURS`, `BY_HAND`.
        apart: Name of the engine with the same number of processes, but without communication.
        alone: Name of the engine with one process.
    """

    start: Callable[[bool], WorkerPool]
    ways: tuple[str, ...]
    apart: str
    alone: str


def by_tfdist(strategy: str, tiny: bool) -> Measure:
    """In a worker: returns a function that measures tfdist or a hand-written loop."""
    use_own_core()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Two threads, so that an operation that waits for other workers does not block others.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    from tfdist import strategies

    if strategy == "one_device":
        cluster.leave()  # no communication between several processes with this strategy
    created = strategies.create(strategy, 1)

    @functools.cache
    def prepared(model: str, way: str, num_steps: int) -> Callable[[], Any]:
        from tfdist.tools.bench.contenders import Case, fit_by_hand, fit_by_tfdist

        by_hand = way == BY_HAND
        has_tf_strategy = hasattr(created, "tf_strategy")
        # TensorFlow and tfdist split a global batch. A Horovod loop gets per-replica batches.
        workers = 1 if by_hand and not has_tf_strategy else created.group.size
        scaled = workload(model, tiny)
        scaled = dataclasses.replace(scaled, batch_size=scaled.batch_size * workers)
        exchange: Any = None
        if not has_tf_strategy and created.group.size > 1:
            import horovod.tensorflow as hvd  # as users call it

            exchange = functools.partial(hvd.grouped_allreduce, op=hvd.Average)
        case = Case(model, scaled, created, num_steps, exchange)
        return fit_by_hand(case) if by_hand else fit_by_tfdist(case)

    return lambda model, way, num_steps: prepared(model, way, num_steps)().ms


def use_own_core() -> None:
    """Restricts this process to the core of its rank."""
    import psutil

    process = psutil.Process()
    cores = process.cpu_affinity()
    process.cpu_affinity([cores[cluster.discover().rank % len(cores)]])


def workload(model: str, tiny: bool) -> Workload:
    """Returns a workload of `MODELS`."""
    return MODELS[model].tiny() if tiny else MODELS[model]


def _workers(strategy: str, **options: Any) -> Callable[[bool], WorkerPool]:
    return lambda tiny: WorkerPool(by_tfdist, strategy, tiny, **options)


_BOTH = (OURS, BY_HAND)
_ALONE, _APART = "one process", "two apart"

ENGINES: dict[str, Engine] = {
    _ALONE: Engine(_workers("one_device", num_workers=1, pauses=True), _BOTH, _ALONE, _ALONE),
    _APART: Engine(_workers("one_device", pauses=True), (OURS,), _APART, _ALONE),
    "multi_worker": Engine(_workers("multi_worker"), _BOTH, _APART, _ALONE),
    "Horovod, MPI": Engine(_workers("horovod", via="mpirun", pauses=True), _BOTH, _APART, _ALONE),
    "Horovod, Gloo": Engine(_workers("horovod"), _BOTH, _APART, _ALONE),
}


def add_arguments(parser: ArgumentParser, engines: Sequence[str] = tuple(ENGINES)) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="networks to train"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=list(engines), default=list(engines), metavar="NAME",
        help=f"one or more of: {'; '.join(engines)}",
    )  # fmt: skip
    harness.add_arguments(parser, rounds=7, chart=True)


def run(
    models: Sequence[str],
    engines: Sequence[str],
    rounds: int,
    output: harness.Output,
    smoke: bool,
    known: Mapping[str, Engine] = ENGINES,
) -> None:
    """Measures and prints tables; the arguments are the values of the flags.

    Raises:
        DeviceError: There is only one core.
        LaunchError: An installed engine cannot be started.
    """
    if num_bound_cores() < 2:
        raise DeviceError("this benchmark needs two cores, one per process, but there is only one.")
    absent = {name: why for name in engines if (why := missing(name))}
    results = []
    with contextlib.ExitStack() as stack:
        pools = {
            name: stack.enter_context(known[name].start(smoke))
            for name in engines
            if name not in absent
        }
        for name in models:
            num_rounds = _SMOKE_ROUNDS if smoke else rounds
            result = measure(name, workload(name, smoke), pools, num_rounds, known)
            results.append(result)
            output.show(
                ("engine", "way", "images/s", "efficiency", "exchange", "relative"),
                [(row["engine"], row["way"], *_cells(row)) for row in result["rows"]],
                f"{result['model']}, batch {result['batch_per_worker']} per process, "
                f"{result['steps']} steps, {result['rounds']} rounds",
                num_names=2,
            )
            for row in result["rows"]:
                if "error" in row:
                    tables.text(f"{row['engine']}, {row['way']} failed: {row['error']}")
    for name, why in absent.items():
        tables.text(f"{name} was not measured: {why}.")
    output.conclude(results, _NOTE, _paint, (5 * len(results), 4.5))


def measure(
    name: str,
    workload: Workload,
    pools: Mapping[str, WorkerPool],
    num_rounds: int,
    known: Mapping[str, Engine] = ENGINES,
) -> dict[str, Any]:
    """Returns images per second, efficiency and overhead by engine and way to train."""
    ready, failed = {}, {}
    for engine, pool in pools.items():
        for way in known[engine].ways:
            ask = functools.partial(_slowest, pool, name, way, workload.num_steps)
            try:
                ask()  # compiles
                ready[engine, way] = ask
            except LaunchError as error:
                why = str(error).splitlines()[-1]
                failed[engine, way] = {"engine": engine, "way": way, "error": why}
    times: Times = harness.run_in_turns(ready, num_rounds)
    rows = [
        _row(key, known[key[0]], times, workload.batch_size * pools[key[0]].num_workers)
        for key in times
    ]
    # Judge tfdist's rows against the loop by hand and the rival.
    rival = next((r["efficiency"]["median"] for r in rows if r["engine"] == RIVAL), None)
    for row in rows:
        if hand := row.get("to_by_hand"):
            hand |= {"goal": HAND_GOAL, "met": hand["median"] <= HAND_GOAL}
        if rival is not None and "exchange" in row and row["way"] == OURS:
            efficiency = row["efficiency"]
            efficiency |= {"goal": rival, "met": efficiency["median"] >= rival}
    return {
        "model": name,
        "batch_per_worker": workload.batch_size,
        "steps": workload.num_steps,
        "rounds": num_rounds,
        "rows": rows + list(failed.values()),
    }


def _slowest(pool: WorkerPool, *request: Any) -> float:
    return max(pool.ask(*request))


def _row(key: tuple[str, str], engine: Engine, times: Times, num_images: int) -> dict[str, Any]:
    name, way = key
    milliseconds = times[key]
    row: dict[str, Any] = {
        "engine": name,
        "way": way,
        "ms": harness.spread(milliseconds),
        "images_per_s": harness.spread([1e3 * num_images / ms for ms in milliseconds]),
        "samples_ms": list(milliseconds),
    }
    if (base := _times_of(times, engine.alone, way)) and name != engine.alone:
        row["efficiency"] = harness.ratio(base, milliseconds)  # with as many images per process
    if (base := _times_of(times, engine.apart, way)) and name not in (engine.apart, engine.alone):
        parts = [1 - without / whole for without, whole in zip(base, milliseconds, strict=True)]
        row["exchange"] = harness.spread(parts)
    if way == OURS and (name, BY_HAND) in times:
        row["to_by_hand"] = harness.ratio(milliseconds, times[name, BY_HAND])
    return row


def _times_of(times: Times, engine: str, way: str) -> Sequence[float] | None:
    """Returns the times of another engine, for the same way to train if available."""
    return times.get((engine, way)) or times.get((engine, OURS))


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return ["failed", "", "", ""]
    rates = harness.as_text(row["images_per_s"], ".0f")
    parts = [_part(row[name]) if name in row else "" for name in ("efficiency", "exchange")]
    relative = harness.as_text(row["to_by_hand"]) if "to_by_hand" in row else ""
    return [rates, *parts, relative]


def _part(spread: Mapping[str, Any]) -> str:
    cell = harness.as_text(spread, ".0%")
    return f"{cell}, goal {spread['goal']:.0%}" if "goal" in spread else cell


def _paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        rows = [row for row in result["rows"] if "efficiency" in row]
        efficiencies = [row["efficiency"] for row in rows]
        medians = [one["median"] for one in efficiencies]
        low = [one["median"] - one["low"] for one in efficiencies]
        high = [one["high"] - one["median"] for one in efficiencies]
        positions = range(len(rows))
        axes.barh(positions, medians, xerr=[low, high], capsize=3)
        axes.set_yticks(positions, [f"{row['engine']}, {row['way']}" for row in rows])
        axes.invert_yaxis()
        axes.axvline(1.0, color="gray", linestyle="--")
        axes.set(title=result["model"], xlabel="efficiency of two processes")
