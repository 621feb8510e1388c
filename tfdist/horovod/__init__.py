"""Horovod's Keras API for Keras 3, which Horovod itself does not support.

Replace `import horovod.tensorflow.keras as hvd` by

    import tfdist.horovod as hvd

and leave the rest of the script unchanged. Each rank passes its own batches to `model.fit` or to a
custom loop, and its loss is the mean over its rows. Give every rank the same number of batches of
the same size. A `tfdist.Trainer`, which splits global batches, does not need this module.
"""

from __future__ import annotations

from typing import Any

from tfdist.horovod import callbacks as callbacks
from tfdist.horovod.batch_norm import SyncBatchNormalization as SyncBatchNormalization
from tfdist.horovod.callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from tfdist.horovod.callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from tfdist.horovod.callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from tfdist.horovod.callbacks import MetricAverageCallback as MetricAverageCallback
from tfdist.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from tfdist.horovod.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
from tfdist.horovod.optimizer import load_model as load_model
from tfdist.horovod.ranks import (
    Average,
    Compression,
    Sum,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    forwarded,
    init,
    is_version_greater_equal_than,
    local_rank,
    local_size,
    rank,
    reducescatter,
    shutdown,
    size,
)

#: Names that are Horovod's, unchanged.
_FORWARDED = [
    "ProcessSet", "add_process_set", "remove_process_set", "global_process_set", "cross_rank",
    "cross_size", "is_initialized", "is_homogeneous", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "gloo_built", "gloo_enabled", "nccl_built", "cuda_built",
    "rocm_built", "ccl_built", "ddl_built", "start_timeline", "stop_timeline", "Adasum", "Max",
    "Min", "Product", "alltoall", "grouped_allreduce", "allgather_object", "broadcast_object",
]  # fmt: skip

__all__ = [
    "Average",
    "BroadcastGlobalVariablesCallback",
    "Compression",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "Sum",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "init",
    "is_version_greater_equal_than",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    if name in _FORWARDED:
        return forwarded(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FORWARDED])
