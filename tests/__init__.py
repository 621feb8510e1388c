"""The test suite, laid out like the packages that it tests."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

# Set before TensorFlow is imported, so that tests print only TensorFlow's errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# With oneDNN, half-precision rounding depends on the CPU's instruction set and on which ops
# TensorFlow fuses. A test would compare kernels instead of training methods.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

#: Logical CPU devices of a test process, and thus the most replicas in one process.
NUM_CPUS = 4


def start_tensorflow() -> None:
    """Splits the CPU into logical devices, and initializes TensorFlow.

    Must run before any test: TensorFlow's logical devices are fixed after the first operation.
    """
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_CPUS)]
    )
    tf.config.list_logical_devices()


def start_tensorflow_when_imported() -> None:
    """Calls `start_tensorflow` right after the first `import tensorflow` of this process.

    Test files that need no TensorFlow then start without that delay.
    """
    if "tensorflow" in sys.modules:
        start_tensorflow()
    else:
        sys.meta_path.insert(0, _StartsTensorFlow())


class _StartsTensorFlow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that loads TensorFlow as Python does, and then initializes it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        start_tensorflow()
