"""Measures batch after batch, each kind of device in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import LaunchError
from tfdist.plan import step_profile
from tfdist.plan.network import Network

#: Of the highest throughput: what a batch reaches that saturates the device.
SATURATED = 0.95


def sweep(
    network: Network, batches: Sequence[int], num_steps: int, memory: int | None
) -> list[dict[str, Any]]:
    """Returns a row for each kind of device and each batch, in this order.

    Args:
        network: What is trained.
        batches: Rising.
        num_steps: That are timed.
        memory: Limit of the CPU's tensors in MB; None: none.

    Raises:
        LaunchError: The smallest batch fails.
    """
    kinds = {"CPU": {"CUDA_VISIBLE_DEVICES": "-1"}}
    if memory:
        kinds["CPU"]["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(memory)
    if tf.config.list_physical_devices("GPU"):
        kinds["GPU"] = {}
    found = [_kind(network, batches, num_steps, environ) for environ in kinds.values()]
    return [row for rows in found for row in rows]


def _kind(
    network: Network, batches: Sequence[int], num_steps: int, environ: dict[str, str]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with step_profile.pool(environ=environ) as pool:
        for batch in batches:
            try:
                (sample,) = pool.ask(network, batch, "one_device", 1, num_steps)
            except LaunchError as error:
                if not rows:
                    raise
                # Some kernels of the CPU crash where memory ends: the last line says what it was.
                is_memory = "out of memory" in str(error)
                why = "out of memory" if is_memory else str(error).strip().splitlines()[-1]
                rows.append({"device": rows[0]["device"], "batch": batch, "error": why})
                break  # no larger one fits
            rows.append(
                {
                    "device": sample.device,
                    "batch": batch,
                    "ms": 1e3 * sample.seconds,
                    "examples_per_s": batch / sample.seconds,
                    "peak_mb": sample.peak_bytes / 1e6,
                }
            )
    best = max(row.get("examples_per_s", 0) for row in rows)
    enough = [row for row in rows if row.get("examples_per_s", 0) >= SATURATED * best]
    enough[0]["saturates"] = True
    return rows
