"""A simulated host with GPUs: `tf.config` lists them, but nothing can run on them."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tensorflow.config import PhysicalDevice


def install(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    visible: str | None,
    capability: tuple[int, int] = (8, 0),
) -> int:
    """Makes `tf.config` list the GPUs that a process on such a host would see.

    Args:
        monkeypatch: Undoes the changes after the test.
        number: Number of GPUs of the host.
        visible: `CUDA_VISIBLE_DEVICES` of the process; None if it is not set.
        capability: Compute capability of all GPUs.

    Returns:
        The number of GPUs that CUDA would show: the entries up to the first invalid one.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = number
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        seen = 0
        for entry in visible.split(","):
            if not (entry.startswith("GPU-") or (entry.isdecimal() and int(entry) < number)):
                break
            seen += 1
    gpus = [PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(seen)]
    config: Any = tf.config
    for function in ("list_physical_devices", "get_visible_devices"):
        original = getattr(config, function)
        monkeypatch.setattr(
            config,
            function,
            lambda kind=None, original=original: gpus if kind == "GPU" else original(kind),
        )
    details = {"device_name": "NVIDIA A100", "compute_capability": capability}
    monkeypatch.setattr(config.experimental, "get_device_details", lambda gpu: details)
    monkeypatch.setattr(config.experimental, "set_memory_growth", lambda gpu, on: None)
    configured = config.get_logical_device_configuration
    monkeypatch.setattr(
        config,
        "get_logical_device_configuration",
        lambda device: None if device.device_type == "GPU" else configured(device),
    )
    return seen
