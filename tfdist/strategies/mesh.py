"""Device meshes: several kinds of parallelism, each along an axis of named size.

A mesh such as `data=2,pipeline=2` says how many ways each kind of parallelism splits the work, like
`keras.distribution.DeviceMesh`. `data` is the outer axis. Along it are processes, which any process
group can join; along the inner axis are the devices of a process. This module imports no
TensorFlow, so that the command line can read a mesh.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.errors import ConfigurationError, did_you_mean

#: The inner axes, with the strategy that splits a model along each.
_INNER = {"pipeline": "pipeline", "tensor": "tensor_parallel", "shard": "sharded"}
_AXES = ("data", *_INNER)
_FORM = "expected axes and sizes, like data=2,pipeline=2"


@dataclass(frozen=True)
class Placement:
    """What each process does in a mesh.

    Attributes:
        strategy: The name of the strategy.
        devices: Number of devices of each process.
        options: Options of the strategy that follow from the mesh.
    """

    strategy: str
    devices: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes of a device mesh."""

    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.sizes.get("data", 1)

    @property
    def inner(self) -> str | None:
        """The name of the inner axis; None if there is only the data axis."""
        return next((name for name in self.sizes if name != "data"), None)

    def strategy(self, process_group: str, num_processes: int) -> str:
        """Returns the name of the strategy that computes on the mesh."""
        if self.inner is not None:
            return _INNER[self.inner]
        if num_processes == 1:
            return "mirrored" if self.data > 1 else "one_device"
        has_one_device = self.data == num_processes
        return "horovod" if has_one_device and process_group != "tensorflow" else "multi_worker"

    def place(self, process_group: str, num_processes: int) -> Placement:
        """Returns what each of a number of processes does.

        Raises:
            ConfigurationError: These processes cannot form the mesh.
        """
        strategy = self.strategy(process_group, num_processes)
        if self.inner is None:
            each, rest = divmod(self.data, num_processes)
            if rest:
                raise self._refused(num_processes, "data has to be a multiple of their number")
            if process_group == "horovod" and strategy == "multi_worker":
                raise self._refused(
                    num_processes,
                    f"that is {each} devices per process, and a process that Horovod joins has "
                    "one: use process_group='tensorflow', or start more processes",
                )
            return Placement(strategy, each, {})
        size, options = self.sizes[self.inner], dict[str, Any](process_group=process_group)
        if self.inner == "shard" and self.data == 1 and num_processes > 1:
            if size != num_processes:
                raise self._refused(
                    num_processes,
                    "shards are over the processes or over the devices of each, not over both: "
                    f"use shard={num_processes}, or data={num_processes},shard={size}",
                )
            return Placement(strategy, 1, options)
        if self.data != num_processes:
            raise self._refused(
                num_processes,
                f"a process has the whole axis {self.inner!r}, so data has to be the number of "
                f"processes: start {self.data} processes with python -m tfdist.launch, or use "
                f"data={num_processes},{self.inner}={size}",
            )
        if self.inner == "pipeline":
            options["stages"] = size
        return Placement(strategy, size, options)

    def _refused(self, num_processes: int, reason: str) -> ConfigurationError:
        plural = "es" if num_processes > 1 else ""
        return ConfigurationError(
            f"mesh={str(self)!r} in {num_processes} process{plural}: {reason}."
        )


def parse(mesh: str | Mapping[str, int] | Mesh) -> Mesh:
    """Returns a mesh, checked.

    Args:
        mesh: Text like `"data=2,pipeline=2"`, or sizes by axis.

    Raises:
        ConfigurationError: An axis is unknown, a size is no positive integer, or tfdist cannot
            compose the axes.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        pairs = [axis.partition("=")[::2] for axis in mesh.split(",")]
    else:
        pairs = [(str(name), str(size)) for name, size in mesh.items()]
    sizes: dict[str, int] = {}
    for given, size in pairs:
        name = given.strip()
        if name not in _AXES:
            raise ConfigurationError(
                f"mesh={mesh!r} has an axis {name!r}; {_FORM}. The axes are {', '.join(_AXES)}."
                f"{did_you_mean(name, _AXES)}"
            )
        if name in sizes or not size.strip().isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f"mesh={mesh!r}: {_FORM}, each axis once and with a size of at least 1."
            )
        sizes[name] = int(size)
    inner = [name for name, size in sizes.items() if name != "data" and size > 1]
    if len(inner) > 1:
        raise ConfigurationError(
            f"mesh={mesh!r}: {' and '.join(inner)} cannot be combined, because each of them places "
            "the weights of a model by itself. Use data and one of them."
        )
    used_sizes = {name: size for name, size in sizes.items() if name == "data" or name in inner}
    if inner and list(used_sizes)[-1] == "data" and len(used_sizes) > 1:
        raise ConfigurationError(
            f"mesh={mesh!r}: data is the outer axis, over processes. Write "
            f"data={used_sizes['data']},{inner[0]}={used_sizes[inner[0]]}."
        )
    return Mesh(used_sizes or {"data": 1})


# ---- objects of keras.distribution ----


def is_keras(strategy: object) -> bool:
    """Returns whether an object is a device mesh or distribution of `keras.distribution`."""
    keras = sys.modules.get("keras")
    if keras is None:
        return False
    kinds = keras.distribution
    return isinstance(strategy, (kinds.DeviceMesh, kinds.DataParallel, kinds.ModelParallel))


def from_keras(distribution: Any) -> tuple[Mesh, list[str], dict[str, Any]]:
    """Returns mesh, device names and strategy options for an object of `keras.distribution`.

    `DataParallel` splits batches over all devices of its mesh, and `ModelParallel` splits weights
    by the rules of its `LayoutMap`. A `DeviceMesh` alone has to have tfdist's names of axes.

    Raises:
        ConfigurationError: tfdist has no exact equivalent.
    """
    import keras

    if isinstance(distribution, keras.distribution.DeviceMesh):
        names = [str(name) for name in distribution.axis_names]
        mesh = parse(dict(zip(names, map(int, distribution.shape), strict=True)))
        return mesh, _devices(distribution), {}
    device_mesh, batch = distribution.device_mesh, distribution.batch_dim_name
    sizes = dict(zip(device_mesh.axis_names, map(int, device_mesh.shape), strict=True))
    others = {name: size for name, size in sizes.items() if name != batch}
    if isinstance(distribution, keras.distribution.DataParallel):
        return Mesh({"data": sizes[batch]}), _devices(device_mesh), {}
    if next(iter(sizes)) != batch or len(others) != 1:
        raise ConfigurationError(
            f"{device_mesh}: a mesh for ModelParallel has the axes {batch!r} and, inside it, one "
            "for the model."
        )
    (axis,) = others
    # Rules for the layout map of a `ModelParallel`.
    from tfdist.upstream.keras_layers import layout_map_of

    layout: dict[str, Sequence[str | None]] = {}
    for pattern, mapped in layout_map_of(distribution).items():
        axes = [None if name is None else str(name) for name in mapped.axes]
        if other := {name for name in axes if name not in (None, axis)}:
            raise ConfigurationError(
                f"The layout of {pattern!r} splits a weight along {', '.join(map(repr, other))}, "
                f"over which batches are split. tfdist splits weights along {axis!r} only; to "
                "shard weights over data-parallel devices, use strategy 'sharded'."
            )
        if any(axes) and len(axes) > 1:  # a bias is split as its kernel is
            layout[rf"^(?:{pattern})$"] = ["model" if name else None for name in axes]
    mesh = Mesh({"data": sizes[batch], "tensor": others[axis]})
    return mesh, _devices(device_mesh), {"layout": layout}


def _devices(device_mesh: Any) -> list[str]:
    return [str(name).upper() for name in device_mesh.devices.flatten()]
