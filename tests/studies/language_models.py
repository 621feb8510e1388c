"""Measures language models on CPUs: memory while one is loaded, and bytes per device.

`python -m tests.studies.language_models loading` loads a model in processes that may allocate less
than its size. `bytes` prints what each device has after a step, and `sequences` the longest rows
for 1 GB of activations. They take some minutes; `loading 5 keras` and `bytes int8` take one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_hub.models as hub
import numpy as np
import psutil

import tfdist
from recipes import finetune
from tfdist.errors import UnsupportedModelError
from tfdist.strategies.sharded.plan import bytes_by_device
from tfdist.strategies.tensor_parallel.strategy import TensorParallel
from tfdist.trainer import Trainer

MB = 10**6
#: Without this, glibc keeps regions of freed tensors, and the limit counts them.
ENVIRON = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
DTYPES = ("float32", "bfloat16", "int8", "int4", "float8")
STRATEGIES = ("mirrored", "sharded", "tensor_parallel", "pipeline")
FORMS = ("keras", "preset", "safetensors")
#: How a model is loaded: number of processes, strategy, and limit as a part of the model's size.
LOADS = {
    "plain Keras": (1, "", 0.7),
    "sharded, 2 processes": (2, "sharded", 0.7),
    "sharded, 2 devices": (1, "sharded", 1.25),
}


# ---- memory while a model is loaded ----


def write(folder: Path, num_layers: int) -> int:
    """Writes a Llama with random weights in each form; returns its bytes."""
    preprocessor = finetune._tiny_preprocessor()
    backbone = hub.Llama3Backbone(
        vocabulary_size=preprocessor.tokenizer.vocabulary_size(), num_layers=num_layers,
        hidden_dim=1024, intermediate_dim=4096, num_query_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    task = hub.Llama3CausalLM(backbone, preprocessor, compile=False)
    task.save(folder / "model.keras")
    task.save_to_preset(str(folder / "preset"))
    task.export_to_transformers(str(folder / "safetensors"))
    return sum(4 * v.shape.num_elements() for v in task.variables)


def read(folder: Path, form: str) -> keras.Model:
    """Loads the model and adds LoRA."""
    if form == "keras":
        task = keras.saving.load_model(folder / "model.keras")
    else:
        task = hub.CausalLM.from_preset(str(folder / form), compile=False)
    task.backbone.enable_lora(4)
    task.compile(keras.optimizers.Adam(1e-3), sampler="greedy")
    return task


def load(folder: Path, form: str, strategy: str, num_bytes: int, limit: float) -> float:
    """Loads a model with a limit on the memory that this process allocates from here on.

    Returns:
        What it allocated, as a part of the model.
    """

    def trained(build: Callable[[], keras.Model]) -> Any:
        if not strategy:
            return build()
        return Trainer(build, strategy, devices=2 if tfdist.size() == 1 else None)

    def small() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4096)])
        model.compile("sgd", "mse")
        return model

    # Allocates buffers of the exchange, and starts threads.
    trained(small).fit(np.ones((8, 8)), np.ones((8, 4096)), verbose=0)
    begin = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (begin + int(limit * num_bytes), -1))
    task = trained(functools.partial(read, folder, form))
    resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
    assert task
    return (psutil.Process().memory_info().data - begin) / num_bytes


def loads(num_layers: int, forms: Sequence[str]) -> None:
    """Prints, by form and way to load it, what each process allocated, or how it ended."""
    python = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write(Path(folder), num_layers)
        print(f"{num_bytes / MB:.0f} MB of weights")
        for form, name in itertools.product(forms, LOADS):
            num_processes, strategy, limit = LOADS[name]
            launch = [*python, "tfdist.launch", "--num-workers", str(num_processes), "--"]
            options = [folder, form, strategy, str(num_bytes), str(limit)]
            command = [*python, "tests.studies.language_models", "load", *options]
            done = subprocess.run(
                [*(launch if num_processes > 1 else ()), *command],
                env=ENVIRON, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            lines = (done.stdout + done.stderr).splitlines()
            of_memory = (line for line in lines if "OOM" in line or "MemoryError" in line)
            allocated = [line.split()[-1] for line in lines if re.search(r"allocated \d", line)]
            result = " and ".join(allocated) if done.returncode == 0 else next(of_memory, lines[-1])
            print(f"| {form} | {name} | {limit} | {result[:150]} |", flush=True)


# ---- bytes per device, and long rows ----


def llama(dtype: str, num_layers: int = 2) -> keras.Model:
    """Returns a Llama with LoRA on frozen weights of a dtype; of float8, all are trained."""
    keras.utils.set_random_seed(1)
    backbone = hub.LlamaBackbone(
        vocabulary_size=1000, num_layers=num_layers, hidden_dim=256, intermediate_dim=512,
        num_query_heads=4, num_key_value_heads=2,
        dtype="float32" if dtype in ("float32", "float8") else "bfloat16",
    )  # fmt: skip
    if "float" not in dtype or dtype == "float8":
        backbone.quantize(dtype)
    if dtype != "float8":
        backbone.enable_lora(4)
    task = hub.LlamaCausalLM(backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    return task


def rows(length: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns two rows of tokens."""
    ones = np.ones((2, length), "int32")
    return {"token_ids": ones, "padding_mask": ones}, ones


def chosen(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Returns the names that are among the arguments, or all if none is."""
    return [name for name in names if name in arguments] or [*names]


def bytes_per_device(arguments: Sequence[str]) -> None:
    """Prints the megabytes of weights and optimizer state on each device after a step."""
    for dtype, strategy in itertools.product(*(chosen(c, arguments) for c in (DTYPES, STRATEGIES))):
        try:
            trainer = Trainer(functools.partial(llama, dtype), strategy=strategy, devices=2)
            trainer.fit(*rows(8), batch_size=2, verbose=0)
        except UnsupportedModelError as error:
            print(f"| {dtype} | {strategy} | refused: {error} |", flush=True)
            continue
        variables = [*trainer.model.variables, *trainer.model.optimizer.variables]
        held = " + ".join(f"{num / MB:.1f}" for num in bytes_by_device(variables).values())
        print(f"| {dtype} | {strategy} | {held} |", flush=True)


def sequences(arguments: Sequence[str]) -> None:
    """Prints the longest rows whose activations take 1 GB on each device, as planned."""
    by_rows = TensorParallel(2, split_activations="rows")
    options: dict[str, dict[str, Any]] = {
        "mirrored": {"strategy": "mirrored", "devices": 2},
        "sharded": {"strategy": "sharded", "devices": 2},
        "sharded, remat": {"strategy": "sharded", "devices": 2, "remat": "all"},
        "tensor_parallel, rows": {"strategy": by_rows},
        "tensor_parallel, rows, remat": {"strategy": by_rows, "remat": "all"},
    }
    for name in chosen([*options], arguments):
        trainer, cells = Trainer(functools.partial(llama, "float32"), **options[name]), []
        # Shorter rows attend as in Keras, longer ones in chunks.
        for lengths in ((256, 512, 1024), (4096, 8192, 16384)):
            plans = [trainer.plan(*rows(length), batch_size=2) for length in lengths]
            planned = [max(device.activations for device in plan) / MB for plan in plans]
            longest = max(np.roots(np.polyfit(lengths, planned, 2) - [0, 0, 1000]).real)
            cells += [" ".join(f"{one:.0f}" for one in planned), f"{longest:,.0f}"]
        print("|", name, "|", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["loading", "bytes", "sequences", "load"])
    parser.add_argument("arguments", nargs="*", help="layers and forms, or a part of the table")
    command, arguments = (parsed := parser.parse_args()).command, parsed.arguments
    if command == "load":  # in a process of its own
        folder, form, strategy, num_bytes, limit = arguments
        part = load(Path(folder), form, strategy, int(num_bytes), float(limit))
        print(f"allocated {part:.2f}")
    elif command == "loading":
        loads(int(arguments[0]) if arguments else 9, arguments[1:] or FORMS)
    else:
        tfdist.devices.configure(2)
        (bytes_per_device if command == "bytes" else sequences)(arguments)


if __name__ == "__main__":
    main()
