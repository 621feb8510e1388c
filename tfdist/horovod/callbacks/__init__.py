"""Horovod's Keras callbacks, one per file."""

from __future__ import annotations

from tfdist.horovod.callbacks.broadcast import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from tfdist.horovod.callbacks.learning_rate_schedule import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
)
from tfdist.horovod.callbacks.learning_rate_warmup import (
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from tfdist.horovod.callbacks.metric_average import MetricAverageCallback as MetricAverageCallback
