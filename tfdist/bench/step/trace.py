"""Where the time of a step goes, in tfdist and in the loop by hand: for when a goal is missed.

Two views of the same steps. The optimised graph has every operation, once. The profiler's trace
has durations, of the operations that TensorFlow holds for expensive and of the stages of `tf.data`,
which are others' threads: a stage's time contains that of the stages before it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfdist.bench.step.contenders import Case, Measure, hand_written, in_loop
from tfdist.upstream.tensorflow_functions import graphs_run_by


class Trace(NamedTuple):
    """One contender's step.

    Attributes:
        operations: How many of each type the optimised graph of the loop has.
        microseconds: Per step, by type of operation or stage of `tf.data`.
    """

    operations: Counter[str]
    microseconds: dict[str, float]


def compare(case: Case) -> dict[str, Trace]:
    """Returns the traces of tfdist and of the loop by hand."""
    return {"tfdist": _trace(case, in_loop), "by hand": _trace(case, hand_written)}


def _trace(case: Case, prepare: Callable[[Case], Measure]) -> Trace:
    measure = prepare(case)
    operations = _operations(measure)
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            measure()
        (file,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    return Trace(operations, _microseconds(space, case.num_steps))


def _operations(measure: Measure) -> Counter[str]:
    """Counts what the largest graph has after optimisation, on all devices, at the first call."""
    graphs = graphs_run_by(measure)
    counts = [Counter(n.op for one in g.partition_graphs for n in one.node) for g in graphs]
    return max(counts, key=Counter.total)


def _microseconds(space: Any, num_steps: int) -> dict[str, float]:
    """Adds up the durations on the host's threads and on the devices."""
    totals: Counter[str] = Counter()
    for plane in space.planes:
        names = {key: _type_of(meta.name) for key, meta in plane.event_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            if name := names[event.metadata_id]:
                totals[name] += event.duration_ps
    return {name: picoseconds / 1e6 / num_steps for name, picoseconds in totals.items()}


def _type_of(event: str) -> str | None:
    """The operation (`node:Type`) or the stage of `tf.data` that an event is of."""
    if event.startswith("Iterator::Root::"):
        stage = event.partition("#")[0].removeprefix("Iterator::Root::")
        return f"tf.data: {stage}" if "[" not in stage else None  # one a repetition otherwise
    _, colon, kind = event.rpartition(":")
    return kind if colon and kind.isidentifier() and "::" not in event else None
