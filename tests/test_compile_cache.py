"""The compile cache: programs of XLA that the next process loads instead of compiling them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.starting import ENVIRON, python
from tfdist import compile_cache
from tfdist.errors import ConfigurationError

SCRIPT = """
import os, sys
import tfdist
folder = tfdist.compile_cache.use(sys.argv[1])
tfdist.compile_cache.compile_in_parallel()
print(os.environ["XLA_FLAGS"], file=sys.stderr)
import keras
import numpy as np
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("adam", "mse", jit_compile=True)
x = np.arange(64.0, dtype="float32").reshape(16, 4) / 64
history = tfdist.Trainer(model, strategy="one_device").fit(x, x[:, :1], verbose=0).history
print(folder, history["loss"][0].hex())
"""


def test_later_process_loads_the_program(tmp_path: Path) -> None:
    """With a GPU, what XLA tunes is kept as well; XLA would end a process with an unknown flag."""
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho NVIDIA H100")
    driver.chmod(0o755)
    with_gpu = {"PATH": f"{driver.parent}:{ENVIRON['PATH']}"}
    # A fixed order of Python's sets makes TensorFlow write the same program each time.
    script = functools.partial(
        python, "-c", SCRIPT, str(tmp_path), env=ENVIRON | with_gpu | {"PYTHONHASHSEED": "0"}
    )
    done = script()
    first = done.stdout.split()
    tuning, parallel = done.stderr.split("--xla_gpu_")[1:3]
    assert tuning.split() == [f"per_fusion_autotune_cache_dir={first[0]}/autotune"]
    assert parallel.split()[0] == "enable_llvm_module_compilation_parallelism=true"
    (program,) = files = [*Path(first[0]).glob("*.pb")]
    written = program.stat().st_mtime_ns
    assert script().stdout.split() == first
    assert [*Path(first[0]).glob("*.pb")] == files
    assert program.stat().st_mtime_ns == written
    program.write_bytes(program.read_bytes()[:-1000])  # it is read: damage is found
    failed = script(code=1)
    assert f"A file in the compile cache {first[0]} is damaged. Delete" in failed.stderr


def test_process_that_uses_tensorflow_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="TensorFlow has already started"):
        compile_cache.use(tmp_path)


@pytest.mark.parametrize("name", ["XLA_FLAGS", "NVIDIA_TF32_OVERRIDE"])
def test_settings_that_change_programs_select_another_folder(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compile_cache._conditions()
    assert compile_cache._conditions() == before
    monkeypatch.setenv(name, "--xla_cpu_enable_fast_math")
    assert compile_cache._conditions() != before


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{tmp_path}/xla_compile_cache__1.pb.tmp; No space left on device"
    error = OSError(f"Graph execution error:\n\n{line}\nmore")
    assert compile_cache.cause_of(error) is None  # no cache in use
    monkeypatch.setattr(compile_cache, "_in_use", [tmp_path])
    assert compile_cache.cause_of(error) == (
        f"The compile cache cannot be used: {line}. Free some space, or choose another folder "
        "with --compile-cache."
    )
    assert compile_cache.cause_of(ValueError("shapes differ")) is None
