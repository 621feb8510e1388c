"""Profiles a step of tfdist and of a hand-written loop: `bench step --profile`.

There are two views of the same steps. The optimized graph has each operation once. The profiler's
trace has durations of operations that TensorFlow considers expensive, and of the stages of
`tf.data`, which run in separate threads. The time of a stage includes the previous stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfdist.console import folders, tables
from tfdist.tools.bench.contenders import Case, Measure, fit_by_hand, fit_by_tfdist
from tfdist.upstream.tensorflow_graphs import graphs_run_by

_MAX_ROWS = 16


class Trace(NamedTuple):
    """The step of one variant.

    Attributes:
        operations: Number of operations of each type in the loop's optimized graph.
        microseconds: Time per step, by type of operation or stage of `tf.data`.
    """

    operations: Counter[str]
    microseconds: dict[str, float]


def show(case: Case) -> None:
    """Traces both variants and prints their largest differences."""
    ours, theirs = _trace(case, fit_by_tfdist), _trace(case, fit_by_hand)
    tables.text(
        f"{case.model}, {case.strategy.num_replicas} replicas: the loop's graph has "
        f"{ours.operations.total()} operations with tfdist, and {theirs.operations.total()} by hand"
    )
    _show_differences("operations in the graph", ours.operations, theirs.operations, 0)
    _show_differences("microseconds per step", ours.microseconds, theirs.microseconds, 1)


def _trace(case: Case, prepare: Callable[[Case], Measure]) -> Trace:
    measure = prepare(case)
    operations = _operations(measure)
    with folders.temporary() as folder:
        with tf.profiler.experimental.Profile(folder):
            measure()
        (file,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    return Trace(operations, _microseconds(space, case.num_steps))


def _operations(measure: Measure) -> Counter[str]:
    """Counts the operations of the largest optimized graph that a first call runs."""
    graphs = graphs_run_by(measure)
    counts = [Counter(n.op for one in g.partition_graphs for n in one.node) for g in graphs]
    return max(counts, key=Counter.total)


def _microseconds(space: Any, num_steps: int) -> dict[str, float]:
    """Sums the durations on the host's threads and on the devices."""
    totals: Counter[str] = Counter()
    for plane in space.planes:
        names = {key: _type_of(meta.name) for key, meta in plane.event_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            if name := names[event.metadata_id]:
                totals[name] += event.duration_ps
    return {name: picoseconds / 1e6 / num_steps for name, picoseconds in totals.items()}


def _type_of(event: str) -> str | None:
    """Returns the type of an operation (`node:Type`) or a stage of `tf.data`, or None."""
    if event.startswith("Iterator::Root::"):
        stage = event.partition("#")[0].removeprefix("Iterator::Root::")
        return f"tf.data: {stage}" if "[" not in stage else None  # one per repetition
    _, colon, kind = event.rpartition(":")
    return kind if colon and kind.isidentifier() and "::" not in event else None


def _show_differences(
    heading: str, ours: Mapping[str, float], theirs: Mapping[str, float], decimals: int
) -> None:
    rows = [(name, ours.get(name, 0), theirs.get(name, 0)) for name in ours.keys() | theirs.keys()]
    largest = sorted(rows, key=lambda row: (-abs(row[1] - row[2]), row[0]))[:_MAX_ROWS]
    tables.numbers(
        (heading, "tfdist", "by hand", "difference"),
        [
            (name, f"{a:.{decimals}f}", f"{b:.{decimals}f}", f"{a - b:+.{decimals}f}")
            for name, a, b in largest
        ],
    )
