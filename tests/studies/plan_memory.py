"""`python -m tests.studies.plan_memory`: predicted memory of a step beside the allocator's peak.

Trains programs of `tests.programs` and tiny models of KerasHub on batches of many rows, each in a
process of its own, with TensorFlow's allocator for GPUs in place of malloc. TensorFlow's profiler
records each allocation with its operation. The peak is compared with what `tfdist plan memory`
predicts. Prints a table, and draws a picture with `--chart FILE.png`.

`--savings` compares steps with activation checkpointing and with activations in host memory, in the
order of GPUs: each operation waits for the one that a GPU starts before it. CPUs share memory with
the host, so that the study copies each activation, and does not count the copies "on the host".
Time is processor time, and what is planned for a card.

What the kernels of CPUs take for the time of one operation is counted apart: those of a GPU do not
have it, or choose it at run time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfdist
from tests.programs.programs import PROGRAMS
from tests.support.data import Data
from tfdist.console import tables
from tfdist.errors import TfdistError
from tfdist.memory import graph, zeros
from tfdist.patches import offload
from tfdist.step import forward_backward
from tfdist.strategies import feed
from tfdist.tools.plan import auto
from tfdist.tools.plan.cards import CARDS
from tfdist.tools.plan.devices import ReplicatedStep
from tfdist.tools.plan.exchange import Link
from tfdist.tools.plan.network import Network
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import current_graph, run_after

#: Largest predicted bytes of a step, by which the number of rows is chosen: tensors should matter
#: more than what the allocator rounds up.
_MOST = 1 << 28
#: Regions of the profiler's events that hold tensors.
_OF_TENSORS = {"output", "temp", "persist"}
#: Networks for `--savings`, and the card whose time is planned.
_NETWORKS = {
    one.model: one
    for one in (
        Network("gpt", (128,), 64, settings={"size": "mini"}),
        Network("mlp", (256,), 10, settings={"units": (256,) * 12}),
        Network("resnet18", (64, 64, 3), 10, settings={"width": 16}),
        Network("unet", (64, 64, 3), 2, settings={"filters": 16}),
    )
}
#: In the names of copies on the host.
_OF_HOST = offload.ON_HOST
_CLUSTER = auto.Cluster(CARDS["A10G"], 1, 1, Link(1.0, 0.0))


class Result(NamedTuple):
    """Predicted and measured bytes of a step on `rows` rows; `refused`: why there are none.

    Attributes:
        measured: The peak of the tensors.
        allocated: The peak of everything, with workspaces of kernels.
        seconds: Processor time of a step.
        of_card: Planned seconds of a step on a card.
    """

    name: str
    rows: int
    predicted: int
    measured: int
    allocated: int
    seconds: float = 0.0
    of_card: float = 0.0
    refused: str = ""


class Allocation(NamedTuple):
    """An allocation that the profiler recorded, or the end of one, with negative bytes."""

    address: int
    num_bytes: int
    operation: str
    region: str


class Case(NamedTuple):
    """A model with rows of data, as `tfdist plan` gets it."""

    model: str
    build: Callable[[], keras.Model]
    data: Any
    precision: str | None = None

    def batch(self, num_rows: int) -> Any:
        """Returns a batch of zeros."""
        return zeros(self.data, num_rows)


def main() -> None:
    """Compares the programs whose names are given, or every N-th and the models of KerasHub."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.plan_memory")
    parser.add_argument("names", nargs="*", help="programs (default: 30 of all families)")
    parser.add_argument("--savings", action="store_true", help="of four networks, or those named")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    arguments = parser.parse_args()
    # Read when TensorFlow creates its devices. Operations run in one order, as on a GPU.
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    tf.config.threading.set_inter_op_parallelism_threads(1)
    results = []
    cases = [(name, "") for name in arguments.names or _names()]
    if arguments.savings:
        cases = [*itertools.product(arguments.names or _NETWORKS, ("none", "all", "offload"))]
    # A process for each, because what earlier models left changes where chunks are.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for one in pool.imap(_compare_named, cases):
            results.append(one)
            print(*one, flush=True)
    (_show_savings(results) if arguments.savings else _show(results, arguments.chart))
    if arguments.json:
        arguments.json.write_text(json.dumps([one._asdict() for one in results], indent=1) + "\n")


def compare(case: Case, saving: str = "") -> Result:
    """Returns the prediction for a model, and what its steps take.

    Args:
        case: What is trained.
        saving: How memory is saved, as `auto.Layout.remat`, in the order of GPUs.
    """
    num_rows, layout = 1, auto.Layout("one_device", 1, 1, remat=saving or "none")
    options = layout.options()[1]
    try:
        # What is read ahead would lie between the tensors, in another order each time.
        with replaced(feed.Feed, "on_devices", False):
            step = ReplicatedStep(case, on_cpu=not saving)
            while step.peak(2 * num_rows) <= _MOST:
                num_rows *= 2
            step = ReplicatedStep(case, on_cpu=not saving, **options) if options else step
            predicted = step.peak(num_rows)
    except TfdistError as error:
        return Result(case.model, num_rows, 0, 0, 0, refused=str(error).splitlines()[0])
    estimate = auto.Estimate({layout.remat: step}, _CLUSTER, num_rows, half=False)
    of_card = estimate.choice(layout).seconds
    del step, estimate
    gc.collect()
    data = _copied_batches(case, num_rows)
    before = _in_use()  # the data set, which is in host memory
    with (
        tempfile.TemporaryDirectory() as folder,
        replaced(offload, "_copy", _really_copied),
        replaced(feed, "is_prefetched", lambda dataset: True),  # reads nothing ahead
    ):
        profile = _Profile(folder)
        trainer = tfdist.Trainer(case.build, steps_per_call=1, verify="off", **options)
        with _as_on_gpu(trainer.strategy) if saving else nullcontext():
            trainer.fit(data, steps_per_epoch=4, verbose=0, callbacks=[profile])
        tf.profiler.experimental.stop()
        events = [one for one in _allocations(Path(folder)) if _OF_HOST not in one.operation]
        began = time.process_time()
        trainer.fit(data, steps_per_epoch=8, verbose=0)
        seconds = (time.process_time() - began) / 8
    at_start = profile.at_start - before
    measured = _peak(filter(_is_tensor, events), at_start)
    allocated = _peak(events, at_start)
    return Result(case.model, num_rows, predicted, measured, allocated, seconds, of_card)


def _compare_named(named: tuple[str, str]) -> Result:
    # The allocator keeps the region of a first large tensor, as a GPU's takes all memory at once.
    tf.raw_ops.Empty(shape=[4 * _MOST // 1024, 1024], dtype=tf.uint8)
    return compare(_case(named[0]), named[1])


@contextmanager
def _as_on_gpu(strategy: Any) -> Iterator[None]:
    """Returns a context in which both passes are traced to run in the order of a GPU.

    Each operation waits for the one that a GPU starts before it.
    """
    gradients, update_metrics = strategy.gradients, forward_backward._update_metrics
    results: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> list[Any]:
        results[:] = gradients(*arguments, **options)
        return list(results)

    def in_order(*arguments: Any) -> None:  # the first thing after the gradients and the copies
        pending, needed = [one.op for one in results if one is not None], set()
        while pending:
            if (op := pending.pop()) not in needed:
                needed.add(op)
                pending += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        effects: list[str] = []  # TensorFlow keeps their order
        traced, named = {}, {op.name: op for op in current_graph().get_operations() if op in needed}
        for name, op in named.items():
            after = [other.name for other in op.control_inputs]
            if op.op_def.is_stateful:
                after, effects = after + effects, [name]
            inputs = [(tensor.op.name, tensor.value_index) for tensor in op.inputs]
            traced[name] = graph.Operation(op.type, inputs, after, [])
        ordered = [named[name] for name in graph.execution_order(traced)]
        for before, after in itertools.pairwise(op for op in ordered if op.inputs and op.outputs):
            run_after([after], [before.outputs[0]])
        update_metrics(*arguments)

    with (
        replaced(strategy, "gradients", noted),
        replaced(forward_backward, "_update_metrics", in_order),
    ):
        yield


def _really_copied(tensor: tf.Tensor, earlier: tf.Operation) -> tf.Tensor:
    """Returns what `offload._copy` returns, copied to "the host" and back by the same device."""
    # Stateful ones, such as DeepCopy, would run in the order in which they are traced.
    with tf.name_scope(_OF_HOST):
        on_host = tf.roll(tensor, 0, 0)
    with tf.control_dependencies([earlier]):
        return tf.roll(on_host, 0, 0)


class _Profile(keras.callbacks.Callback):
    """Records the third and fourth step; the first two compile and create variables."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder, self.at_start = folder, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.at_start = _in_use()
            options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
            tf.profiler.experimental.start(self._folder, options)


def _in_use() -> int:
    return tf.config.experimental.get_memory_info("CPU:0")["current"]


def _allocations(folder: Path) -> Iterator[Allocation]:
    """Yields the allocations of a profile in their order, and their ends, with negative bytes."""
    (file,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    events = []
    for plane in space.planes:
        names = {number: one.name for number, one in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                kind = plane.event_metadata[event.metadata_id].name
                if kind in ("MemoryAllocation", "MemoryDeallocation"):
                    time = 1000 * line.timestamp_ns + event.offset_ps
                    events.append((time, kind == "MemoryAllocation", _stats(event, names)))
    live: dict[int, Allocation] = {}
    for _, begins, stats in sorted(events, key=lambda one: one[0]):
        address = stats["addr"]
        if begins:
            named = stats.get("tf_op", ""), stats.get("region_type", "")
            live[address] = Allocation(address, stats["allocation_bytes"], *named)
            yield live[address]
        else:
            unknown = Allocation(address, stats["allocation_bytes"], "", "output")
            ended = live.pop(address, unknown)
            yield ended._replace(num_bytes=-ended.num_bytes)


def _is_tensor(one: Allocation) -> bool:
    """Returns whether an allocation is no workspace: convolutions unfold patches into one."""
    is_unfolded = one.region == "temp" and "conv" in one.operation.rpartition("/")[-1].lower()
    return one.region in _OF_TENSORS and not is_unfolded


def _stats(event: Any, names: dict[int, str]) -> dict[str, Any]:
    stats = {}
    for one in event.stats:
        kind = one.WhichOneof("value")
        value = getattr(one, kind)
        stats[names[one.metadata_id]] = names[value] if kind == "ref_value" else value
    return stats


def _peak(allocations: Iterable[Allocation], in_use: int) -> int:
    peak = in_use
    for one in allocations:
        in_use += one.num_bytes
        peak = max(peak, in_use)
    return peak


def _copied_batches(case: Case, num_rows: int) -> tf.data.Dataset:
    """Returns a data set of which each step gets a copy, as a GPU would, and nothing ahead."""
    rows = keras.tree.map_structure(lambda a: np.resize(a, (num_rows, *a.shape[1:])), case.data)
    data = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(rows)).repeat()
    options = tf.data.Options()
    options.autotune.enabled = options.experimental_optimization.inject_prefetch = False
    return data.map(
        lambda *batch: tf.nest.map_structure(lambda tensor: tf.reverse(tensor, [0]), batch)
    ).with_options(options)


def _names() -> list[str]:
    """Returns thirty programs of all families, and the models of KerasHub."""
    usual = [name for name, one in PROGRAMS.items() if not one.only_fit]
    return [*usual[:: len(usual) // 30][:30], *_of_keras_hub()]


def _of_keras_hub() -> dict[str, tuple[Callable[[], keras.Model], Data]]:
    from tests.programs import test_keras_hub as hub

    return {
        "hub-gpt2": hub.causal_lm("GPT2", hub.HEADS),
        "hub-gemma": hub.causal_lm("Gemma", hub.GEMMA),
        "hub-mistral": hub.causal_lm("Mistral", hub.GROUPED_HEADS),
        "hub-bert": hub.classifier("Bert", hub.HEADS),
        "hub-roberta-masked": hub.masked_lm("Roberta", hub.HEADS, hub.TOKENS),
    }


def _case(name: str) -> Case:
    """Returns a network, a program or a model of KerasHub, in float32, in which users train."""
    if name in _NETWORKS:
        return Case(name, _NETWORKS[name].build, _NETWORKS[name].batch(1))
    program = PROGRAMS.get(name)
    build, data = (program.build, program.data) if program else _of_keras_hub()[name]

    def in_float32() -> keras.Model:
        keras.config.set_floatx("float32")
        return build()

    def of_float32(array: Any) -> np.ndarray:
        array = np.asarray(array)
        return array.astype("float32") if array.dtype == "float64" else array

    parts = tuple(part for part in (data.x, data.y, data.sample_weight) if part is not None)
    in_tuples = keras.tree.lists_to_tuples(keras.tree.map_structure(of_float32, parts))
    return Case(name, in_float32, in_tuples)


def _ratio(one: Result) -> float:
    return one.predicted / one.measured


def _show_savings(results: list[Result]) -> None:
    """Prints memory and time with each saving, the time in times of that without."""
    rows = []
    for number, one in enumerate(results):
        plain, saving = results[number - number % 3], ("none", "all", "offload")[number % 3]
        rows.append((
            one.name, str(one.rows), saving, f"{one.predicted / 1e6:.0f}",
            f"{one.measured / 1e6:.0f}", f"{one.seconds / plain.seconds:.2f}",
            f"{one.of_card / plain.of_card:.2f}",
        ))  # fmt: skip
    header = ("network", "rows", "remat", "predicted, MB", "measured, MB", "processor time", "A10G")
    tables.numbers(header, rows, num_names=3)


def _show(results: list[Result], chart: Path | None) -> None:
    """Prints the results, the ones within 15 % counted, and draws them."""
    ran = sorted((one for one in results if not one.refused), key=_ratio)
    rows = [
        (one.name, str(one.rows), *(f"{n / 1e6:.1f}" for n in one[2:5]), f"{_ratio(one):.2f}")
        for one in ran
    ]
    header = ("program", "rows", "predicted, MB", "tensors, MB", "with workspaces", "ratio")
    tables.numbers(header, rows)
    close = sum(abs(_ratio(one) - 1) <= 0.15 for one in ran)
    print(f"{close} of {len(ran)} within 15 %, {len(results) - len(ran)} refused")
    if chart:
        from matplotlib.figure import Figure

        axes = (figure := Figure(figsize=(5, 5), layout="constrained")).subplots()
        measured = np.array([one.measured / 1e6 for one in ran])
        axes.fill_between(ends := [measured.min(), measured.max()], [0.85 * e for e in ends],
                          [1.15 * e for e in ends], alpha=0.2, label="within 15 %")  # fmt: skip
        axes.scatter(measured, [one.predicted / 1e6 for one in ran], s=16)
        axes.set(xscale="log", yscale="log", xlabel="measured, MB", ylabel="predicted, MB")
        axes.legend()
        figure.savefig(chart, dpi=100)


if __name__ == "__main__":
    main()
