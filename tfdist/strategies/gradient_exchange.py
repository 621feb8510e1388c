"""The options of strategies whose processes exchange gradients: buckets and compression."""

from __future__ import annotations

from types import MappingProxyType

import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.strategies.base import Strategy

_WIRE_DTYPES = MappingProxyType({"fp16": tf.float16, "bf16": tf.bfloat16})


def set_gradient_exchange(strategy: Strategy, compression: str, bucket_mb: float | str) -> None:
    """Sets how a strategy exchanges gradients between processes.

    Args:
        strategy: The strategy.
        compression: `"fp16"` or `"bf16"` halves what is sent, and rounds it; `"none"` keeps the
            numbers of one device.
        bucket_mb: Megabytes of a gradient bucket, sent while the backward pass continues; `"auto"`:
            by the size of all gradients; `"all"`: one bucket.

    Raises:
        ConfigurationError: `bucket_mb` is not a size.
    """
    if bucket_mb in ("all", "auto"):
        strategy.bucket_bytes = None if bucket_mb == "all" else "auto"
    elif isinstance(bucket_mb, (int, float)) and bucket_mb > 0:
        strategy.bucket_bytes = int(bucket_mb * (1 << 20))
    else:
        raise ConfigurationError(
            f"bucket_mb={bucket_mb!r}: expected megabytes above 0, 'auto' or 'all'."
        )
    if compression != "none":
        strategy.wire_dtype = _WIRE_DTYPES[compression]
        name = strategy.wire_dtype.name
        strategy.inexact = {"compression": f"gradients are sent between workers as {name}"}
