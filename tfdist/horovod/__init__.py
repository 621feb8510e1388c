"""Horovod's names for Keras, on Horovod's operations alone: its own do not know Keras 3.

    import tfdist.horovod as hvd

in place of `import horovod.tensorflow.keras as hvd`; the script stays as it is. Each rank feeds
its own batches to `model.fit` or to a loop of its own, and its losses are means over its rows: so
give every rank as many batches, and of one size. A `tfdist.Trainer` splits global batches itself
and needs nothing of this module.
"""

from __future__ import annotations

from tfdist.horovod import callbacks as callbacks
from tfdist.horovod.batch_norm import SyncBatchNormalization as SyncBatchNormalization
from tfdist.horovod.callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from tfdist.horovod.callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from tfdist.horovod.callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from tfdist.horovod.callbacks import MetricAverageCallback as MetricAverageCallback
from tfdist.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from tfdist.horovod.ranks import (
    Average,
    Compression,
    Sum,
    allgather,
    allreduce,
    broadcast,
    broadcast_variables,
    init,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

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
    "broadcast_variables",
    "callbacks",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
