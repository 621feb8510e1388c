"""A folder for programs that XLA has compiled, so that the next process need not compile them.

TensorFlow names each file after the program alone. What else determines the compiled code, such as
the processor, is part of the name of a subfolder here, so that hosts can share the folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import tensorflow as tf

from tfdist.cluster import gpus
from tfdist.errors import ConfigurationError
from tfdist.upstream.tensorflow_runtime import computes_in_one_order, has_listed_devices

_FLAGS = "TF_XLA_FLAGS"
#: Environment variables that change what XLA compiles.
_VARIABLES = (_FLAGS, "XLA_FLAGS", "TF_DETERMINISTIC_OPS", "NVIDIA_TF32_OVERRIDE")
#: The folder of this process.
_in_use: list[Path] = []


def use(folder: str | Path) -> Path:
    """Keeps the programs that XLA compiles in a folder, for models with `jit_compile=True`.

    Call it before anything uses TensorFlow, which reads its flags once. Several processes and hosts
    may share the folder. Nothing is ever deleted from it. TensorFlow may pass the arguments of a
    program in another order in each process, so that a few starts can add variants of a program.

    Example:
        >>> import tfdist
        >>> folder = tfdist.compile_cache.use("compiled")
        >>> folder.is_dir()
        True

    Args:
        folder: A local or network folder, which is created if necessary.

    Returns:
        The subfolder for this processor, these GPUs and this version of TensorFlow.

    Raises:
        ConfigurationError: TensorFlow has read its flags, or the folder cannot be created.
    """
    if has_listed_devices():
        raise ConfigurationError(
            f"The compile cache {folder} has no effect, because TensorFlow has already started. "
            "Call tfdist.compile_cache.use before anything that uses TensorFlow."
        )
    chosen = Path(folder).absolute() / _conditions()
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The compile cache {folder} cannot be created: {error.strerror}. Choose another "
            "folder with --compile-cache."
        ) from error
    before = os.environ.get(_FLAGS, "")
    os.environ[_FLAGS] = f"{before} --tf_xla_persistent_cache_directory={chosen}".strip()
    if gpus.facts("name"):  # what XLA measured to choose the kernels of a GPU
        tuning = chosen / "autotune"
        tuning.mkdir(exist_ok=True)
        _set_by_default("xla_gpu_per_fusion_autotune_cache_dir", tuning)
    _in_use[:] = [chosen]
    return chosen


def compile_in_parallel() -> None:
    """Lets XLA compile the kernels of a GPU on all cores; call it before TensorFlow starts.

    By default one thread compiles all of them, and a ResNet-50 takes minutes. A value that the user
    set in `XLA_FLAGS` is kept.
    """
    _set_by_default("xla_gpu_enable_llvm_module_compilation_parallelism", "true")


def _set_by_default(option: str, value: object) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if option not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{option}={value}".strip()


def cause_of(error: Exception) -> str | None:
    """Returns a message about the cache if it is the cause of an error of TensorFlow, or None."""
    if not _in_use:
        return None
    folder, text = _in_use[0], str(error)
    # TensorFlow may print where the operation was defined before it names the file.
    if named := [line for line in text.splitlines() if str(folder) in line]:
        return (
            f"The compile cache cannot be used: {named[0]}. Free some space, or choose another "
            "folder with --compile-cache."
        )
    if "Read less bytes than requested" in text:  # without the name of the file
        return f"A file in the compile cache {folder} is damaged. Delete this folder."
    return None


def _conditions() -> str:
    """Returns the name of a folder for the conditions under which programs are compiled."""
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    facts = [
        tf.__version__,
        _processor(),
        gpus.facts("name,driver_version"),
        computes_in_one_order(),
        tf32,
    ]
    facts += [os.environ.get(name, "") for name in _VARIABLES]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"tensorflow-{tf.__version__}-{digest[:16]}"


def _processor() -> str:
    """Returns the kind of processor and its instruction sets, where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
