"""What a process holds of activations: kept for the way back, or computed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.console import tables
from tfdist.launcher.worker_pool import WorkerPool

RECOMPUTES = ("none", "all")
_COUNTED = {"TF_CPU_ALLOCATOR_USE_BFC": "1"}
_SECONDS = 900.0
_BLOCKS, _LAYERS, _STEPS = 8, 4, 3


def held(recompute: str, rows: int, width: int) -> dict[str, Any]:
    """Returns what one device holds in a step beside weights, in activations of one layer.

    Args:
        recompute: Out of `RECOMPUTES`.
        rows: Of a batch.
        width: Of each layer.

    Raises:
        LaunchError: The training failed.
    """
    with WorkerPool(
        _prepare, num_workers=1, via="", environ=_COUNTED, answer_seconds=_SECONDS
    ) as pool:
        (told,) = pool.ask(recompute, rows, width)
    return {"contender": f"recompute {recompute}", "rows": rows, "width": width, **told}


def show(results: Sequence[dict[str, Any]]) -> None:
    """Prints what each way holds, beside what it is expected to at least."""
    tables.numbers(
        ("", "in a step, beside weights", "inputs of layers or blocks", "ms a step"),
        [
            (
                result["contender"],
                f"{result['activations']:.1f}",
                str(_BLOCKS * (1 if result["contender"] == "recompute all" else _LAYERS)),
                f"{1000 * result['seconds']:.0f}",
            )
            for result in results
        ],
        title=f"{_BLOCKS} blocks of {_LAYERS} dense layers with GELU, in outputs of one layer "
        f"({results[0]['rows']:,} x {results[0]['width']} float32)",
    )


def _prepare() -> Callable[[str, int, int], dict[str, Any]]:
    """In the process: returns what trains, and says what was held."""
    import keras
    import tensorflow as tf

    from tfdist.trainer import Trainer

    class Block(keras.layers.Layer):
        """A few dense layers, computed again together."""

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

    def told(recompute: str, rows: int, width: int) -> dict[str, Any]:
        def build() -> keras.Model:
            blocks = [Block(width) for _ in range(_BLOCKS)]
            model = keras.Sequential([keras.Input((width,)), *blocks])
            model.compile(keras.optimizers.SGD(1e-3), "mse")
            return model

        trainer = Trainer(build, "one_device", recompute=recompute)
        x = tf.ones([rows, width])
        data = tf.data.Dataset.from_tensors((x, x)).repeat()
        trainer.fit(data, steps_per_epoch=1, verbose=0)
        tf.config.experimental.reset_memory_stats("CPU:0")
        rest, began = _info(tf)["current"], time.perf_counter()
        trainer.fit(data, steps_per_epoch=_STEPS, verbose=0)
        seconds = (time.perf_counter() - began) / _STEPS
        return {"activations": (_info(tf)["peak"] - rest) / (4 * rows * width), "seconds": seconds}

    return told


def _info(tf: Any) -> dict[str, int]:
    return tf.config.experimental.get_memory_info("CPU:0")
