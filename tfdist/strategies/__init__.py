"""Who computes, and how sums cross the replicas: one file a strategy.

This module imports no TensorFlow, so that a command line can list strategies and options at once.
A new strategy is a file with its class, and its declaration in the table.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from tfdist import cluster
from tfdist.errors import ConfigurationError, did_you_mean
from tfdist.strategies.channel_split.rules import RulesOrFile
from tfdist.strategies.declaration import Declaration as Declaration
from tfdist.strategies.declaration import Option as Option

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy as Strategy

_COMPRESSION = Option(
    Literal["none", "fp16", "bf16"],
    "in what format gradients cross; bf16: not under horovod",
    "none",
)
_BUCKET_MB = Option(
    Literal["all", "auto"] | PositiveFloat,
    "megabytes of gradients that cross together, while the backward pass goes on; auto: by how "
    "many there are; all: at once",
    "auto",
)
_PARAMETER_DEVICE = Option(str, "who holds the variables", "CPU:0")

#: The strategies by name. An option that stands here is a flag of the training command.
STRATEGIES: dict[str, Declaration] = {
    "one_device": Declaration("tfdist.strategies.base:Strategy"),
    "mirrored": Declaration(
        "tfdist.strategies.mirrored:Mirrored",
        {
            "all_reduce": Option(
                Literal["auto", "nccl", "hierarchical_copy", "one_device"],
                "how gradients are summed over devices",
                "auto",
            ),
            "merge_on": Option(Literal["auto", "gpu", "cpu"], "where gradients are summed", "auto"),
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
            "stages": Option(PositiveInt, "parts that a model is cut into", "one a device"),
            "micro_batches": Option(PositiveInt, "parts that a batch is cut into", 4),
            "order": Option(
                Literal["gpipe", "1f1b"],
                "gpipe: all forward, then all back; 1f1b: less in memory",
                "gpipe",
            ),
            "cut_at": Option(
                str, "names of layers, a,b: a stage ends behind each", "where it is balanced"
            ),
            "balance": Option(
                Literal["parameters", "time", "memory"],
                "what the stages have the same of; time: as it is measured; memory: of weights and "
                "what is kept of micro-batches",
                "parameters",
            ),
            "balance_rows": Option(PositiveInt, "of a micro-batch, for --balance memory", 8),
            "plot_stages": Option(str, "a picture to draw the timeline of the stages into", "none"),
        },
        across_processes=True,
        by_horovod=True,
        least_devices=2,
    ),
    "channel_split": Declaration(
        "tfdist.strategies.channel_split.strategy:ChannelSplit",
        {
            "layout": Option(
                RulesOrFile,
                "a YAML file of rules, which axes of weights to cut by regular expressions on "
                "their paths: dense/kernel: [null, model]",
                "each layer that can be split is, by itself",
            )
        },
        across_processes=True,
        by_horovod=True,
        least_devices=2,
    ),
    "sharded": Declaration(
        "tfdist.strategies.sharded.strategy:Sharded",
        {
            "shard": Option(
                Literal["optimizer", "gradients", "parameters"],
                "what each device or process keeps a part of: optimizer state; sums of gradients, "
                "too; weights, too (ZeRO 1, 2, 3)",
                "parameters",
            ),
            "offload": Option(
                Literal["none", "optimizer"],
                "what is in the host's memory, and computed there: what optimizers keep and change",
                "none",
            ),
        },
        across_processes=True,
        by_horovod=True,
    ),
    "parameter_server": Declaration(
        "tfdist.strategies.parameter_server.strategy:ParameterServer",
        {"num_servers": Option(PositiveInt, "servers, where no launcher starts them", 1)},
        asynchronous=True,
    ),
    "multi_worker": Declaration(
        "tfdist.strategies.multi_worker.strategy:MultiWorker",
        {
            "communication": Option(
                Literal["auto", "ring", "nccl"], "how gradients are summed over workers", "auto"
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


def create(
    name: str | Strategy, devices: int | str | Sequence[str] | None = None, **options: Any
) -> Strategy:
    """Returns the strategy called `name`.

    Args:
        name: One of `STRATEGIES`. What is a strategy already is returned as it is.
        devices: As `tfdist.devices.resolve` takes them.
        **options: What the strategy's own class takes; an option that is None is left out.

    Raises:
        ConfigurationError: No strategy has that name, or it has no such option; or devices are
            given for what is a strategy already; or a launcher started several processes, which
            the strategy does not join.
    """
    if not isinstance(name, str):
        made = _made(name, devices)
        _check_joins(made.name)
        return made
    if name not in STRATEGIES:
        raise ConfigurationError(
            f"No strategy is called {name!r}; choose one of {', '.join(STRATEGIES)}."
            f"{did_you_mean(name, STRATEGIES)}"
        )
    _check_joins(name)
    strategy = STRATEGIES[name].load()
    given = {key: value for key, value in options.items() if value is not None}
    for option in given.keys() - inspect.signature(strategy).parameters.keys():
        others = " and ".join(options_by_name().get(option, {})) or "none"
        raise ConfigurationError(
            f"strategy {name!r} takes no option {option!r} ({others} does): leave it out."
        )
    return strategy(devices, **given)


def options_by_name() -> Mapping[str, Mapping[str, Option]]:
    """Returns what all strategies together take: of each option, its declaration by strategy."""
    found: dict[str, dict[str, Option]] = {}
    for strategy, declared in STRATEGIES.items():
        for name, option in declared.options.items():
            found.setdefault(name, {})[strategy] = option
    return found


def _check_joins(name: str) -> None:
    """Refuses N trainings that pass for one: each would run, and write, by itself."""
    started = cluster.started_together()
    declared = STRATEGIES.get(name)
    if started is None or declared is None or declared.joins_processes:
        return
    raise ConfigurationError(
        f"{started.source} started {started.size} processes, and {name!r} would train in each by "
        "itself: use strategy 'multi_worker', 'horovod' or 'sharded'; to train one model in each "
        "all the same, call tfdist.cluster.leave() first."
    )


def _made(strategy: Strategy, devices: int | str | Sequence[str] | None) -> Strategy:
    """Returns what is a strategy already, if nothing contradicts it."""
    base = importlib.import_module("tfdist.strategies.base").Strategy
    if not isinstance(strategy, base):
        raise ConfigurationError(
            f"strategy={strategy!r}: expected a tfdist Strategy or one of the names "
            f"{', '.join(STRATEGIES)}."
        )
    if devices is not None:
        raise ConfigurationError("devices go to the strategy where it is an object.")
    return strategy


def __getattr__(attribute: str) -> Any:
    if attribute == "Strategy":
        return importlib.import_module("tfdist.strategies.base").Strategy
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
