"""What the start-up table says of a model whose layers are split."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import keras

from tfdist.strategies.sharded.plan import num_bytes
from tfdist.strategies.tensor_parallel.layout import Layout
from tfdist.upstream.keras_model import flatten_layers

_NAMES = {
    "column": "by column",
    "row": "by row",
    "channels": "by group",
    "heads": "by head",
    "vocabulary": "by vocabulary",
}


def rows(model: keras.Model, layout: Layout, devices: Sequence[str]) -> dict[str, str]:
    """Returns lines about what is split, the work in it, and the weights of each device.

    Args:
        model: Built.
        layout: Of its layers.
        devices: Of the parts.
    """
    cut = {id(c.variable): c for split in layout.splits for c in split.cuts}
    weights = model.trainable_variables + model.non_trainable_variables
    sizes = {id(v): v.shape.num_elements() for v in weights if v.dtype != "string"}
    share = sum(size for key, size in sizes.items() if key in cut) / max(sum(sizes.values()), 1)
    kinds = collections.Counter(_NAMES[split.kind] for split in layout.splits)
    split = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "no layer"
    work = _share_of_work(layout, set(cut)) if layout.calls else None
    held = dict.fromkeys(devices, 0.0)
    for weight in (v for v in weights if v.dtype != "string"):
        parts = cut[id(weight)].division.sizes if id(weight) in cut else [1]
        for device, size in zip(devices, parts, strict=False):
            held[device] += num_bytes(weight) * size / sum(parts)
    return {
        "split": f"{share:.1%} of {sum(sizes.values()):,} parameters"
        + (f" and {work:.1%} of the work" if work is not None else "")
        + f" over {len(devices)} devices: {split}"
        + (f" ({layout.why_whole})" if layout.why_whole else ""),
        "whole": f"all else, on {devices[0]}",
        "weights": ", ".join(f"{device} {num / 1e6:,.1f} MB" for device, num in held.items()),
    }


def _share_of_work(layout: Layout, cut: set[int]) -> float:
    """Returns the share of the multiplications by weights that split layers make.

    Of layers that call no others; tables multiply nothing.
    """
    split_layers, done, total = {id(split.layer) for split in layout.splits}, 0.0, 0.0
    inner = {
        id(layer)
        for split in layout.splits
        for layer in flatten_layers(split.layer)
        if layer is not split.layer
    }
    for call in layout.calls:
        layer = call.layer
        if not isinstance(layer, keras.layers.Layer) or isinstance(layer, keras.layers.Embedding):
            continue
        is_split = id(layer) in split_layers
        if id(layer) in inner or (len(flatten_layers(layer)) > 1 and not is_split):
            continue
        kernels = [v for v in layer.trainable_variables if len(v.shape) > 1]
        work = call.positions * sum(v.shape.num_elements() for v in kernels)
        total += work
        done += work * is_split
    return done / total if total else 0.0
