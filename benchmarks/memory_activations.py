"""Memory of activations: plain Keras, and with and without activation checkpointing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.tools.bench import harness

#: Plain Keras, and values of the trainer's `remat`.
KERAS = "plain Keras"
CONTENDERS = (KERAS, "none", "all")
_TIMEOUT_SECONDS = 900.0
_BLOCKS, _LAYERS, _STEPS = 8, 4, 3


def measure(contender: str, rows: int, width: int) -> dict[str, Any]:
    """Returns what a step holds besides weights, in outputs of one layer.

    Raises:
        LaunchError: The training failed.
    """
    from tfdist.tools.plan.step_profile import MEMORY_COUNTING

    with WorkerPool(
        _prepare, num_workers=1, via="", environ=MEMORY_COUNTING, timeout_seconds=_TIMEOUT_SECONDS
    ) as pool:
        (answer,) = pool.ask(contender, rows, width)
    name = contender if contender == KERAS else f"remat {contender}"
    return {"contender": name, "rows": rows, "width": width, **answer}


def show(results: Sequence[dict[str, Any]], output: harness.Output) -> None:
    """Prints what each contender holds, beside the inputs that it has to keep."""
    rows = [
        (
            result["contender"],
            f"{result['activations']:.1f}",
            str(_BLOCKS * (1 if result["contender"] == "remat all" else _LAYERS)),
            f"{1000 * result['seconds']:.0f}",
        )
        for result in results
    ]
    output.show(
        ("", "held in a step", "inputs of layers or blocks", "ms/step"),
        rows,
        f"activations of {_BLOCKS} blocks of {_LAYERS} dense layers with GELU, in outputs of one "
        f"layer ({results[0]['rows']:,} x {results[0]['width']} float32)",
    )


def _prepare() -> Callable[[str, int, int], dict[str, Any]]:
    """In the process: returns what trains and returns what was held."""
    import keras
    import tensorflow as tf

    from tfdist.trainer import Trainer

    class Block(keras.layers.Layer):
        """Dense layers that are recomputed together."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.dense = [keras.layers.Dense(width, "gelu") for _ in range(_LAYERS)]

        def build(self, input_shape: Any) -> None:
            for layer in self.dense:
                layer.build(input_shape)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            for layer in self.dense:
                inputs = layer(inputs)
            return inputs

    def memory(key: str) -> int:
        return tf.config.experimental.get_memory_info("CPU:0")[key]

    def answer(contender: str, rows: int, width: int) -> dict[str, Any]:
        def build() -> keras.Model:
            blocks = [Block(width) for _ in range(_BLOCKS)]
            model = keras.Sequential([keras.Input((width,)), *blocks])
            model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
            return model

        is_keras = contender == KERAS
        trainer = build() if is_keras else Trainer(build, "one_device", remat=contender)
        x = tf.ones([rows, width])
        data = tf.data.Dataset.from_tensors((x, x)).repeat()
        trainer.fit(data, steps_per_epoch=1, verbose=0)
        tf.config.experimental.reset_memory_stats("CPU:0")
        rest, began = memory("current"), time.perf_counter()
        trainer.fit(data, steps_per_epoch=_STEPS, verbose=0)
        seconds = (time.perf_counter() - began) / _STEPS
        return {"activations": (memory("peak") - rest) / (4 * rows * width), "seconds": seconds}

    return answer
