"""The tests, laid out as the packages they test."""

from __future__ import annotations

import gc
import os

# Before TensorFlow starts: only its errors are of interest in a test's output.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

NUM_CPUS = 4


def start_tensorflow() -> None:
    """Cuts the CPU into logical devices, which has to come before TensorFlow's first operation."""
    import keras  # noqa: F401 - imported here so that it is frozen below
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_CPUS)]
    )
    tf.config.list_logical_devices()  # starts it, so that no test can make more for the others
    # Collecting garbage walks all that TensorFlow and Keras imported, a quarter second each time.
    gc.freeze()
