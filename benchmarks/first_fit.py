"""`python -m benchmarks.first_fit CONTENDER MODEL REPLICAS`: prints one first fit as JSON.

`start` runs it in a new process.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.start import BATCH_SIZE, MODELS
from tfdist import devices
from tfdist.trainer import Trainer
from tfdist.upstream.tensorflow_graphs import seconds_of_tracing


def by_tfdist(model: str, num_replicas: int) -> Callable[..., Any]:
    """Returns `fit` of a trainer."""
    strategy = "one_device" if num_replicas == 1 else "mirrored"
    return Trainer(lambda: _compiled(model), strategy=strategy, devices=num_replicas).fit


def by_keras(model: str, num_replicas: int) -> Callable[..., Any]:
    """Returns `fit` of a plain model; several replicas use TensorFlow's own strategy."""
    if num_replicas == 1:
        return _compiled(model).fit
    names = devices.resolve(num_replicas, num_replicas)
    gpus = names[0].startswith("GPU")
    operations = None if gpus else tf.distribute.ReductionToOneDevice()
    with tf.distribute.MirroredStrategy(names, operations).scope():
        return _compiled(model).fit


def main(arguments: list[str]) -> None:
    """Prints seconds of processor time, gigabytes and the loss."""
    contender, model, number = arguments
    devices.configure(int(number))
    _, x, y = MODELS[model]()
    fit = {"tfdist": by_tfdist, "Keras": by_keras}[contender](model, int(number))
    began = time.process_time()
    with seconds_of_tracing() as traced:
        history = fit(x, y, batch_size=BATCH_SIZE, verbose=0, shuffle=False)
    seconds = time.process_time() - began
    measured = {
        "cpu_s": seconds,
        "trace_cpu_s": traced[0],
        "rest_cpu_s": seconds - traced[0],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "loss": float(history.history["loss"][0]),
    }
    json.dump(measured, sys.stdout)


def _compiled(name: str) -> keras.Model:
    random.seed(0)  # Keras's initializers draw their seeds from here
    model, _, _ = MODELS[name]()
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", logits, jit_compile=False)  # as in tfdist, also on GPUs
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
