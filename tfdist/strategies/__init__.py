"""Strategies: where computation runs, and how replicas exchange sums.

`STRATEGIES` lists them with their options. This module imports no TensorFlow, so that `--help` can
show strategies and options at once. To add a strategy, write a module with its class and add a line
to the table.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from tfdist import cluster
from tfdist.cluster.environments import slurm
from tfdist.cluster.remote import names_remote
from tfdist.errors import ConfigurationError, did_you_mean
from tfdist.strategies import mesh as meshes
from tfdist.strategies.tensor_parallel.rules import RulesOrFile

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy as Strategy


@dataclass(frozen=True)
class Option:
    """An argument of a strategy's class, for which the training command has a flag.

    Attributes:
        type: An annotation that pydantic can check: `int`, `str`, `Literal["a", "b"]`.
        help: The description in `--help`.
        default: The value if the option is left out, for `--help`.
    """

    type: Any
    help: str
    default: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The fixed set of values; empty if there is none."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()

    def check(self, name: str, value: object) -> None:
        """Checks a value against the choices, if the option has a fixed set of them.

        Raises:
            ConfigurationError: The value is not one of the choices.
        """
        if self.choices and value not in self.choices:
            raise ConfigurationError(
                f"{name}={value!r}: expected one of {', '.join(self.choices)}."
            )


@dataclass(frozen=True)
class Declaration:
    """A line of the table of strategies.

    Attributes:
        path: The class, as `"module:Class"`.
        options: Arguments of the class besides devices, by name.
        across_processes: Whether several processes that all run the script can train together.
        by_horovod: Whether they exchange sums through Horovod.
        min_devices: The smallest number of devices of a process.
        asynchronous: Whether it matches one device only if there is a single worker.
    """

    path: str
    options: Mapping[str, Option] = field(default_factory=dict)
    across_processes: bool = False
    by_horovod: bool = False
    min_devices: int = 1
    asynchronous: bool = False

    @property
    def supports_processes(self) -> bool:
        """Whether N processes train one model together, instead of one model each."""
        return self.across_processes or self.asynchronous

    def load(self) -> Any:
        """Imports and returns the class, and TensorFlow with it."""
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)

    def check(self, **values: object) -> None:
        """Checks values of options that have a fixed set of choices.

        Raises:
            ConfigurationError: A value is not one of the choices.
        """
        for name, value in values.items():
            self.options[name].check(name, value)


_COMPRESSION = Option(
    Literal["none", "fp16", "bf16"],
    "number format in which gradients are sent; bf16: not under horovod",
    "none",
)
_BUCKET_MB = Option(
    Literal["all", "auto"] | PositiveFloat,
    "megabytes of a gradient bucket, sent while the backward pass continues; auto: depends on the "
    "size of all gradients; all: one bucket",
    "auto",
)
_PROCESS_GROUP = Option(
    Literal["auto", "horovod", "tensorflow"],
    "library for collectives between processes: Horovod (auto) or TensorFlow",
    "auto",
)
_PARAMETER_DEVICE = Option(str, "device that holds the variables", "CPU:0")

#: The name that stands for the data-parallel strategy of however this process was started.
AUTO = "auto"

#: The strategies by name. Each option is also a flag of the training command.
STRATEGIES: dict[str, Declaration] = {
    "one_device": Declaration("tfdist.strategies.one_device:OneDevice"),
    "mirrored": Declaration(
        "tfdist.strategies.mirrored:Mirrored",
        {
            "all_reduce": Option(
                Literal["auto", "nccl", "hierarchical_copy", "one_device"],
                "all-reduce algorithm over the devices",
                "auto",
            ),
            "merge_on": Option(
                Literal["auto", "gpu", "cpu"], "device type that sums gradients", "auto"
            ),
        },
    ),
    "central_storage": Declaration(
        "tfdist.strategies.central_storage:CentralStorage", {"parameter_device": _PARAMETER_DEVICE}
    ),
    "towers": Declaration(
        "tfdist.strategies.towers:Towers", {"parameter_device": _PARAMETER_DEVICE}
    ),
    "pipeline": Declaration(
        "tfdist.strategies.pipeline.strategy:Pipeline",
        {
            "stages": Option(
                PositiveInt, "number of pipeline stages", "one per device; interleaved: two"
            ),
            "micro_batches": Option(PositiveInt, "micro-batches per batch", 4),
            "order": Option(
                Literal["gpipe", "1f1b", "interleaved", "zb"],
                "schedule; gpipe: all forward, then all backward passes; 1f1b: needs less memory; "
                "interleaved: several stages per device, smaller bubble; zb: as 1f1b with split "
                "backward passes, smaller bubble",
                "gpipe",
            ),
            "cut_at": Option(
                str, "layers that end a stage, separated by commas", "balanced stages"
            ),
            "balance": Option(
                Literal["parameters", "memory"],
                "quantity to balance over the stages; memory: weights and activations for the "
                "backward pass",
                "parameters",
            ),
            "balance_rows": Option(PositiveInt, "rows of a micro-batch, for --balance memory", 8),
            "process_group": _PROCESS_GROUP,
        },
        across_processes=True,
        by_horovod=True,
        min_devices=2,
    ),
    "tensor_parallel": Declaration(
        "tfdist.strategies.tensor_parallel.strategy:TensorParallel",
        {
            "layout": Option(
                RulesOrFile,
                "YAML file with rules that map a regular expression for weight paths to the axis "
                "to split, such as dense/kernel: [null, model]",
                "every layer that can be split",
            ),
            "split_activations": Option(
                Literal["none", "rows"],
                "rows: also divide activations between split layers, by the rows of the batch "
                "(sequence parallelism)",
                "none",
            ),
            "process_group": _PROCESS_GROUP,
        },
        across_processes=True,
        by_horovod=True,
        min_devices=2,
    ),
    "sharded": Declaration(
        "tfdist.strategies.sharded.strategy:Sharded",
        {
            "shard": Option(
                Literal["optimizer", "gradients", "parameters"],
                "what to shard over devices or processes: optimizer state (ZeRO-1); also gradients "
                "(ZeRO-2); also weights (ZeRO-3)",
                "parameters",
            ),
            "offload": Option(
                Literal["none", "optimizer"],
                "what to store in host memory and update on the CPU",
                "none",
            ),
            "process_group": _PROCESS_GROUP,
        },
        across_processes=True,
        by_horovod=True,
    ),
    "parameter_server": Declaration(
        "tfdist.strategies.parameter_server.strategy:ParameterServer",
        {
            "num_servers": Option(
                PositiveInt, "number of parameter servers, if no launcher starts them", 1
            )
        },
        asynchronous=True,
    ),
    "multi_worker": Declaration(
        "tfdist.strategies.multi_worker:MultiWorker",
        {
            "communication": Option(
                Literal["auto", "ring", "nccl"], "all-reduce algorithm over the workers", "auto"
            ),
            "bucket_mb": _BUCKET_MB,
            "compression": _COMPRESSION,
        },
        across_processes=True,
    ),
    "horovod": Declaration(
        "tfdist.strategies.horovod:Horovod",
        {"compression": _COMPRESSION, "bucket_mb": _BUCKET_MB},
        across_processes=True,
        by_horovod=True,
    ),
}

#: Former names of strategies, which command lines, configurations and `create` still accept.
ALIASES = MappingProxyType({"channel_split": "tensor_parallel"})


def current_name(name: str) -> str:
    """Returns the current name of a strategy from its current or former name."""
    return ALIASES.get(name, name)


def create(
    name: str | Strategy | None,
    devices: int | str | Sequence[str] | None = None,
    *,
    mesh: str | Mapping[str, int] | meshes.Mesh | None = None,
    **options: Any,
) -> Strategy:
    """Returns the strategy with the name `name`, or the one for a mesh.

    Example:
        >>> strategy = tfdist.strategies.create("mirrored", devices=2)
        >>> strategy.num_replicas
        2
        >>> trainer = tfdist.Trainer(build_model, strategy=strategy)

    Args:
        name: One of `STRATEGIES` or `ALIASES`; None: as the mesh implies. `"auto"`: `mirrored` in
            one process, on the devices that TensorFlow has if it has started; over the processes
            of a launcher, the data-parallel strategy that joins them. A strategy object is
            returned as it is. A `DeviceMesh`, `DataParallel` or `ModelParallel` of
            `keras.distribution` stands for the equivalent strategy.
        devices: As for `tfdist.devices.resolve`.
        mesh: Axes and sizes, like `"data=2,pipeline=2"`: see `mesh`. The axes are `data`, and one
            of `pipeline`, `tensor`, and `shard`.
        **options: Arguments of the strategy's class. An option that is None is ignored.

    Raises:
        ConfigurationError: No strategy has that name, the strategy has no such option, devices are
            given along with a strategy object, a launcher started several processes and the
            strategy does not train over processes, or these processes cannot form the mesh.
    """
    if meshes.is_keras(name):
        if devices is not None or mesh is not None:
            raise ConfigurationError(
                f"{name!r} already defines devices and a mesh. Remove devices= and mesh=."
            )
        mesh, names, more = meshes.from_keras(name)
        # The devices of all processes have the same names, so each process uses its own.
        devices = names if getattr(cluster.started_together(), "size", 1) == 1 else None
        name, options = None, options | more
    if mesh is not None:
        name, devices, options = _on_mesh(mesh, name, devices, options)
    if name == AUTO:
        name, devices = _automatic(devices)
    if not isinstance(name, str):
        strategy_object = _made(name, devices)
        _check_joins(strategy_object.name)
        return strategy_object
    name = current_name(name)
    if name not in STRATEGIES:
        raise ConfigurationError(
            f"There is no strategy {name!r}. Choose one of {', '.join(STRATEGIES)}."
            f"{did_you_mean(name, STRATEGIES)}"
        )
    _check_joins(name)
    strategy = STRATEGIES[name].load()
    given = {key: value for key, value in options.items() if value is not None}
    for option in given.keys() - inspect.signature(strategy).parameters.keys():
        others = " and ".join(options_by_name().get(option, {})) or "none"
        raise ConfigurationError(
            f"strategy {name!r} has no option {option!r} (an option of {others}). Remove it."
        )
    if "TF_CONFIG" in os.environ:  # the strategy connects the workers
        importlib.import_module("tfdist.upstream.tensorflow_runtime").start_without_hook()
    return strategy(devices, **given)


def options_by_name() -> Mapping[str, Mapping[str, Option]]:
    """Returns the declarations of each option of any strategy, by the strategy's name."""
    by_option: dict[str, dict[str, Option]] = {}
    for strategy, declared in STRATEGIES.items():
        for name, option in declared.options.items():
            by_option.setdefault(name, {})[strategy] = option
    return by_option


def _automatic(
    devices: int | str | Sequence[str] | None,
) -> tuple[str, int | str | Sequence[str] | None]:
    """Returns the data-parallel strategy that fits how this process was started, and its devices.

    A model that is already built has started TensorFlow, which can then no longer divide the CPU.
    """
    started = cluster.started_together()
    if started is not None:
        joined = "multi_worker" if started.addresses or started.master else "horovod"
        return "parameter_server" if started.ps else joined, devices
    if devices is None and "tensorflow" in sys.modules:
        runtime = importlib.import_module("tfdist.upstream.tensorflow_runtime")
        if runtime.has_started():
            devices = importlib.import_module("tfdist.devices").available()
    return "mirrored", devices


def _check_joins(name: str) -> None:
    """Raises an error for a single-process strategy in several processes."""
    started = cluster.started_together()
    declared = STRATEGIES.get(name)
    if started is None or declared is None or declared.supports_processes:
        return
    shell = " In an interactive shell of srun, unset SLURM_PROCID."
    raise ConfigurationError(
        f"{started.source} started {started.size} processes, but {name!r} would train a separate "
        "model in each. Use strategy 'multi_worker', 'horovod' or 'sharded'. To train separate "
        "models, call tfdist.cluster.leave() first." + shell * slurm.is_interactive(os.environ)
    )


def _on_mesh(
    mesh: str | Mapping[str, int] | meshes.Mesh,
    name: str | Strategy | None,
    devices: int | str | Sequence[str] | None,
    options: dict[str, Any],
) -> tuple[str, int | str | Sequence[str], dict[str, Any]]:
    started, process_group = cluster.started_together(), options.get("process_group") or "auto"
    parsed = meshes.parse(mesh)
    num_processes = 1 if started is None else started.size
    placed = parsed.place(process_group, num_processes)
    if name is not None and (not isinstance(name, str) or current_name(name) != placed.strategy):
        raise ConfigurationError(
            f"mesh={str(parsed)!r} implies strategy {placed.strategy!r}, but strategy={name!r}. "
            "Remove one of the two."
        )
    names = [devices] if isinstance(devices, str) else devices
    num_devices = names if isinstance(names, int) else len(names or range(placed.devices))
    # Devices of other hosts are named for all processes, others for each of them.
    remote = num_processes > 1 and names_remote(names)
    if num_devices != placed.devices * (num_processes if remote else 1):
        where = f"each of {num_processes} processes" if remote else "each process"
        raise ConfigurationError(
            f"mesh={str(parsed)!r} has {placed.devices} devices in {where}, but "
            f"devices={devices!r}."
        )
    given = {key: value for key, value in options.items() if key != "process_group"}
    return placed.strategy, names or placed.devices, given | dict(placed.options)


def _made(strategy: Strategy | None, devices: int | str | Sequence[str] | None) -> Strategy:
    base = importlib.import_module("tfdist.strategies.base").Strategy
    if not isinstance(strategy, base):
        raise ConfigurationError(
            f"strategy={strategy!r}: expected a tfdist Strategy or one of the names "
            f"{', '.join(STRATEGIES)}."
        )
    if devices is not None:
        raise ConfigurationError(
            "devices= has no effect on a strategy object. Pass the devices to the strategy."
        )
    return strategy


def __getattr__(attribute: str) -> Any:
    if attribute == "Strategy":
        return importlib.import_module("tfdist.strategies.base").Strategy
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
