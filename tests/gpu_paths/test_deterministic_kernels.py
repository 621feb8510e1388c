"""Which layers and metrics of Keras have no deterministic GPU kernel.

With deterministic operations TensorFlow raises `UnimplementedError` where a GPU kernel has no
deterministic implementation. `REFUSED` holds the operations for which the installed wheel has such
a message, as far as a graph of Keras can contain them. Training without determinism is not
concerned, nor is training on CPUs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.gpu_paths.kernel_coverage import gpus_listed
from tests.support import ROOT
from tests.support.starting import ENVIRON, SECONDS

#: Operations whose GPU kernels raise `UnimplementedError` when determinism is required.
REFUSED = {
    "AdjustContrast",
    "AdjustContrastv2",
    "Bincount",
    "CropAndResizeGradBoxes",
    "CropAndResizeGradImage",
    "DenseBincount",
    "Dilation2DBackpropFilter",
    "Dilation2DBackpropInput",
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    "MaxPoolGradWithArgmax",
    "ResizeNearestNeighborGrad",
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
    "SparseTensorDenseMatMul",
}

#: Layers of Keras with an operation of `REFUSED`. Both count the pixels of each brightness.
EXPECTED = {"Equalization": {"DenseBincount"}, "RandAugment": {"DenseBincount"}}

#: Arguments of layers that need some; a layer that cannot be built from them is left out.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "SeparableConv1D", "SeparableConv2D"), (4, 3)),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose"), (4, 3)),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), (3,)),
    **dict.fromkeys(("Dense", "GRU", "LSTM", "SimpleRNN"), (4,)),
    **dict.fromkeys(("RandomCrop", "Resizing", "CenterCrop"), (6, 6)),
    **dict.fromkeys(("RandomShear", "RandomTranslation"), (0.1, 0.1)),
    **dict.fromkeys(("AdaptiveAveragePooling2D", "AdaptiveMaxPooling2D"), (2,)),
    **dict.fromkeys(("UpSampling1D", "UpSampling2D"), (2,)),
    "Embedding": (10, 4),
    "GroupNormalization": (1,),
    "RandomColorJitter": (0.1, 0.1, 0.1, 0.1),
    "RandomPosterization": (4,),
}
_RATE = (0.2,)  # of dropout, and of most augmentations


@pytest.mark.long
def test_layers_and_metrics_without_deterministic_gpu_kernels() -> None:
    # In a process of its own, because determinism cannot be turned off again.
    command = [sys.executable, "-m", __name__]
    subprocess.run(command, cwd=ROOT, env=ENVIRON, timeout=SECONDS, check=True)


def main() -> int:
    """Compares what was found with `EXPECTED`, and returns 0 if they are equal."""
    keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    kinds: dict[str, set[str]] = {}
    with gpus_listed():
        for name, graph in _graphs():
            kinds.setdefault(name, set()).update(_operations(graph))
    results = {name: of_name & REFUSED for name, of_name in kinds.items() if of_name & REFUSED}
    print(f"{len(kinds)} layers, losses and metrics; refused on GPUs: {results}")
    return 0 if results == EXPECTED and len(kinds) > 130 else 1


def _graphs() -> Iterator[tuple[str, tf.Graph]]:
    """Yields graphs of layers with gradients, of losses with gradients, and of metrics."""
    scores = tf.constant([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]])
    one_hot, labels = tf.one_hot([1, 0], 3), tf.constant([1, 0])
    tokens = tf.constant([[1, 2, 3], [4, 5, 6]])
    for name, layer_type in _classes(keras.layers, keras.layers.Layer):
        arguments = _ARGUMENTS.get(name, ())
        for value in (tf.ones((2, 8, 8, 3)), tf.ones((2, 8, 4)), tokens):
            for given in (arguments, _RATE):
                yield from _traced(name, partial(layer_type, *given), _layer_gradients, value)
    for name, loss_type in _classes(keras.losses, keras.losses.Loss):
        for truth in (one_hot, labels):
            yield from _traced(name, loss_type, _loss_gradient, truth, scores)
    for name, metric_type in _classes(keras.metrics, keras.metrics.Metric):
        for given in ((), (3,), (0.5,)):
            for pair in ((one_hot, scores), (labels, scores), (labels, labels)):
                yield from _traced(name, partial(metric_type, *given), _update, *pair)


def _classes(module: Any, base: type) -> Iterator[tuple[str, Any]]:
    for name, found in sorted(vars(module).items()):
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            yield name, found


def _traced(
    name: str, build: Callable[[], Any], run: Callable[..., Any], *inputs: tf.Tensor
) -> Iterator[tuple[str, tf.Graph]]:
    """Yields the graph of a function of an object, unless the object does not take the inputs."""
    try:
        built = build()
        if isinstance(built, keras.layers.Layer):
            built(*inputs)
        function = tf.function(lambda *given: run(built, *given))
        yield name, function.get_concrete_function(*inputs).graph
    except Exception:  # of whatever type: Keras and TensorFlow raise many for unsuitable inputs
        return


def _layer_gradients(layer: Any, value: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([value] * value.dtype.is_floating)
        try:
            outputs = layer(value, training=True)
        except TypeError:
            outputs = layer(value)
        total = tf.reduce_sum(tf.cast(outputs, tf.float32) ** 2)
    weights = [weight.value for weight in layer.trainable_variables]
    return tape.gradient(total, [value] * value.dtype.is_floating + weights)


def _loss_gradient(loss: Any, truth: tf.Tensor, scores: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(scores)
        value = loss(truth, scores)
    return tape.gradient(value, scores)


def _update(metric: Any, truth: tf.Tensor, guess: tf.Tensor) -> None:
    metric.update_state(truth, guess)


def _operations(graph: tf.Graph) -> set[str]:
    definition = graph.as_graph_def()
    functions = [node.op for found in definition.library.function for node in found.node_def]
    return {node.op for node in definition.node} | set(functions)


if __name__ == "__main__":
    sys.exit(main())
