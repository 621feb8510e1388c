"""Tensor parallelism: the layers of a model in slices, each slice on its own device.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", section 3. A process has one replica, which has all rows. What differs from one device
is where the channels of a layer are computed.
"""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.devices import colocate_with_inputs
from tfdist.errors import TooFewDevicesError
from tfdist.groups.base import ProcessGroup
from tfdist.groups.fusion import by_device
from tfdist.strategies import STRATEGIES, batches
from tfdist.strategies.base import ReplicaFn, Strategy, join_processes
from tfdist.strategies.feed import Feed
from tfdist.strategies.sharded.division import OverDevices
from tfdist.strategies.sharded.plan import frozen_to_cut, num_bytes
from tfdist.strategies.tensor_parallel import rules
from tfdist.strategies.tensor_parallel.calls import Calls
from tfdist.strategies.tensor_parallel.layout import Layout, layout
from tfdist.strategies.tensor_parallel.rules import Rules
from tfdist.strategies.tensor_parallel.splits import Cut
from tfdist.strategies.variables import VariableLayout
from tfdist.upstream import keras_model, keras_variables
from tfdist.upstream.keras_optimizers import refuse_elsewhere, slots_of, unwrapped
from tfdist.upstream.keras_training import weights_swapped_by_assignment
from tfdist.upstream.keras_variables import Division, ShardedGradient, ShardedVariable

_KINDS = {
    "column": "by column",
    "row": "by row",
    "channels": "by group",
    "heads": "by head",
    "vocabulary": "by vocabulary",
}


class TensorParallel(Strategy):
    """Layers split by channels, heads or columns over the devices of a process.

    Each of several processes has all slices and computes its part of each batch. The gradients of a
    slice are exchanged from the slice's own device.

    Example:
        >>> from tfdist.strategies.tensor_parallel.strategy import TensorParallel
        >>> trainer = tfdist.Trainer(build_model, strategy=TensorParallel(2))
        >>> len(trainer.strategy.devices)
        2

    Args:
        devices: As for `tfdist.devices.resolve`; a slice of each split layer on each.
        layout: Which axes of weights to split, by regular expressions on their paths, as in a
            `keras.distribution.LayoutMap`: `{"dense/kernel": (None, "model")}` splits by column,
            `("model", None)` by row, and what no rule names stays whole. None: every layer that can
            be split is, by column, or by row if it follows a column.
        smallest: The smallest number of elements of the kernel of a layer that is split, without a
            layout.
        process_group: What exchanges sums between processes: `"horovod"`, `"tensorflow"`, or
            `"auto"`, which is Horovod.
        split_activations: `"rows"` also divides the activations between split layers, by the rows
            of the batch (sequence parallelism); `"none"` has them on the first device.

    Raises:
        TooFewDevicesError: Fewer than two devices.
        ConfigurationError: An invalid rule, or different numbers of devices
            in the processes.
        DeviceError: A device that does not exist.
        MissingError: Several processes, and Horovod is not installed.
    """

    name = "tensor_parallel"
    default_cpus = 2
    variables: SlicedVariables

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        layout: Rules | None = None,
        smallest: int = 1024,
        process_group: str = "auto",
        split_activations: str = "none",
    ) -> None:
        STRATEGIES["tensor_parallel"].check(
            process_group=process_group, split_activations=split_activations
        )
        names, group = join_processes(process_group, devices, self.default_cpus)
        if len(names) < 2:
            raise TooFewDevicesError(
                f"strategy 'tensor_parallel' splits layers over devices, but got only {names[0]}: "
                "use devices=2 or more, or strategy 'one_device'."
            )
        self.layout = None if layout is None else dict(rules.checked(layout))
        self._by_rows = split_activations == "rows"
        # One replica, which has all rows, and slices of the layers on each device.
        variables = SlicedVariables(names, group, self.layout, smallest)
        super().__init__(names, group, variables, Feed(names, group, num_shares=1))

    def describe(self) -> dict[str, str]:
        rows = super().describe() | {"shard policy": "each device has all rows of a batch"}
        if self._by_rows:
            rows["activations"] = "between split layers, in parts of the rows on all devices"
        return rows

    def run(self, fn: ReplicaFn) -> Any:
        layouts = list(self.variables.layouts.values())
        splits = [split for layout in layouts for split in layout.splits]
        following = [layer for layout in layouts for layer in layout.following]
        between = [operation for layout in layouts for operation in layout.between]
        calls = Calls(self.devices).instead(splits, following, between, self._by_rows)
        with calls, tf.device(self.devices[0]):
            return fn(0)

    def local_results(self, results: Any) -> list[Any]:
        return [results]

    def gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, sources: Sequence[Any], alone: bool = False
    ) -> list:
        flat = tf.nest.flatten(sources)
        # Those of a graph are on the devices of the forward pass, unlike a tape's.
        of_graph = not tf.executing_eagerly()
        gradients = tf.gradients(loss, flat) if of_graph else tape.gradient(loss, flat)
        return [_or_none(g) for g in tf.nest.pack_sequence_as(list(sources), gradients)]

    def all_reduce(self, tensors: list) -> list:
        return self.variables.all_reduce(tensors)

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        if tf.executing_eagerly():
            return [fn(results)]
        with tf.compat.v1.device(colocate_with_inputs):
            return [fn(results)]

    def outputs(
        self, fn: Callable[[batches.Batch], Any], element: batches.Element, whole: bool = False
    ) -> list[Any]:
        if not whole:
            return super().outputs(fn, element)
        return self.local_results(self.run(lambda i: fn(element.shares[i].rows)))


class SlicedVariables(VariableLayout):
    """Slices of split layers' weights, one on each device; what stays whole is on the first."""

    are_local = False

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup,
        rules: Mapping[str, Any] | None,
        smallest: int,
    ) -> None:
        super().__init__(devices, group)
        self._host, self._rules = connection.on_this_host("CPU:0"), rules
        self._smallest = 1 if rules is not None else smallest
        self._stored = OverDevices(len(devices))  # frozen weights of layers that are not split
        self.layouts: weakref.WeakKeyDictionary[keras.Model, Layout]
        self.layouts = weakref.WeakKeyDictionary()
        self._rows = {"split": "known when the shapes of the data are known"}

    def describe(self) -> dict[str, str]:
        return self._rows

    @contextmanager
    def patched_keras(self) -> Iterator[None]:
        with super().patched_keras(), weights_swapped_by_assignment():
            yield

    def scope(self) -> AbstractContextManager[Any]:
        return connection.spread(self._devices, self._host)

    def place(self, model: Any) -> None:
        if model.built:
            optimizer = getattr(model, "optimizer", None)
            self._arrange(model, [optimizer] if optimizer is not None else [])

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        cut = self._arrange(model, optimizers)
        plain = [unwrapped(optimizer) for optimizer in optimizers]
        weights = {id(v) for v in model.variables}
        for slot, weight in (pair for optimizer in plain for pair in slots_of(optimizer)):
            if id(weight) in cut and slot.shape == weight.shape:
                self._divide(slot, cut[id(weight)].division)
            elif id(weight) in weights:
                self._put(slot)
        for optimizer in plain if cut else ():
            refuse_elsewhere(optimizer, keras_variables.ELSEWHERE)
        super().prepare(model, optimizers)

    def _arrange(self, model: keras.Model, optimizers: Sequence[Any]) -> Mapping[int, Cut]:
        """Gives each device its slices of the weights, and the first device what stays whole."""
        plain = [unwrapped(optimizer) for optimizer in optimizers]
        arranged = layout(
            model, plain, len(self._devices), self._rules, self._smallest, self.layouts.get(model)
        )
        self.layouts[model] = arranged
        cut = {id(one.variable): one for split in arranged.splits for one in split.cuts}
        frozen: list[keras.Variable] = []
        if self._rules is None:  # with rules, what none of them names stays whole
            frozen = frozen_to_cut(model, max(self._smallest, len(self._devices)))
        stored = {id(v) for v in frozen} - cut.keys()
        self._rows = _describe(model, arranged, self._devices, stored)
        for variable in model.variables:
            if id(variable) in cut:
                self._divide(variable, cut[id(variable)].division)
            elif id(variable) in stored:
                self._divide(variable, self._stored)
            elif keras.backend.is_float_dtype(variable.dtype):  # not seeds and counters
                self._put(variable)
        gc.collect()  # cycles may hold the full values, and Python frees them at any time
        return cut

    def _put(self, variable: keras.Variable) -> None:
        if isinstance(variable, ShardedVariable):  # it could be split before
            keras_variables.unite(variable, self._host)
        keras_model.move(variable, self._devices[0])

    def _divide(self, variable: keras.Variable, division: Division) -> None:
        """Divides a variable, unless it is divided in this way already."""
        if isinstance(variable, ShardedVariable):
            if variable.division == division:
                return
            keras_variables.unite(variable, self._host)
        keras_variables.divide(variable, division, self._devices, keep_whole=False)

    def all_reduce(self, tensors: list) -> list:
        """Returns tensors summed over the processes, each on its own device."""
        if self._group.size == 1:
            return tensors
        return by_device(self._group.all_reduce, tensors)

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums the gradients of each slice over the processes, on the slice's device."""
        slices = {i: ShardedGradient(g) for i, g in gradients.items() if isinstance(g, tuple)}
        if self._group.size == 1:
            return slices
        return tf.nest.pack_sequence_as(slices, self.all_reduce(tf.nest.flatten(slices)))


def _or_none(gradient: Any) -> Any:
    if isinstance(gradient, ShardedGradient) and all(piece is None for piece in gradient):
        return None
    return gradient


# ---- the start-up table ----


def _describe(
    model: keras.Model, found: Layout, devices: Sequence[str], stored: Set[int]
) -> dict[str, str]:
    """Returns rows about what is split, the work in it, and the weights of each device."""
    cut = {id(c.variable): c for split in found.splits for c in split.cuts}
    weights = model.trainable_variables + model.non_trainable_variables
    sizes = {id(v): v.shape.num_elements() for v in weights if v.dtype != "string"}
    share = sum(size for key, size in sizes.items() if key in cut) / max(sum(sizes.values()), 1)
    kinds = collections.Counter(_KINDS[split.kind] for split in found.splits)
    split = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "no layer"
    work = _share_of_work(found) if found.calls else None
    held = dict.fromkeys(devices, 0.0)
    for weight in (v for v in weights if v.dtype != "string"):
        parts = cut[id(weight)].division.sizes if id(weight) in cut else [1]
        parts = [1] * len(devices) if id(weight) in stored else parts
        for device, size in zip(devices, parts, strict=False):
            held[device] += num_bytes(weight) * size / sum(parts)
    return {
        "split": f"{share:.1%} of {sum(sizes.values()):,} parameters"
        + (f" and {work:.1%} of the work" if work is not None else "")
        + f" over {len(devices)} devices: {split}"
        + (f" ({found.reason_whole})" if found.reason_whole else ""),
        **({"stored in shards": f"{len(stored)} frozen weights of other layers"} if stored else {}),
        "whole": f"all else, on {connection.short(devices[0])}",
        "weights": ", ".join(
            f"{connection.short(device)} {num / 1e6:,.1f} MB" for device, num in held.items()
        ),
    }


def _share_of_work(found: Layout) -> float:
    """Returns the share of the multiplications by weights that split layers compute.

    Only layers that call no others count; a look-up in a table multiplies nothing.
    """
    split_layers, done, total = {id(split.layer) for split in found.splits}, 0.0, 0.0
    inner = {
        id(layer)
        for split in found.splits
        for layer in keras_model.flatten_layers(split.layer)
        if layer is not split.layer
    }
    for call in found.calls:
        layer = call.layer
        if not isinstance(layer, keras.layers.Layer):
            continue
        is_table = isinstance(layer, keras.layers.Embedding)
        if is_table and call.output_rank != call.rank:
            continue
        is_split = id(layer) in split_layers
        if id(layer) in inner or (len(keras_model.flatten_layers(layer)) > 1 and not is_split):
            continue
        sizes = [v.shape.num_elements() for v in layer.weights if len(v.shape) > 1]
        # Logits are multiplied by one of a reversible table's two weights of the same size.
        work = call.positions * (max(sizes, default=0) if is_table else sum(sizes))
        total += work
        done += work * is_split
    return done / total if total else 0.0
