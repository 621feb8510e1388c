"""Which callbacks run on every worker, and which on the chief alone.

A script hands the same list on every worker. Callbacks that decide (EarlyStopping, a scheduler of
the learning rate) run on all of them, on the same numbers; those that write files or report to a
tracker would do it once a worker. A callback says which it is by an attribute of its class or its
own, `chief_only = True` or `False`. One that does not say is judged by what it derives from.

One of the chief's that never changes the model may say so too, by `only_reads = True`: the workers
then need not compare their variables at the end of each epoch.
"""

from __future__ import annotations

import keras

#: Of Keras: they write files, or send.
_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)

#: Exactly these leave the model as it is; what derives from them may not.
_READERS = frozenset({*_WRITERS} - {keras.callbacks.BackupAndRestore})

#: Packages whose callbacks report to experiment trackers; TensorBoard's own is for hyperparameters.
_TRACKERS = frozenset(
    {
        "aim",
        "clearml",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "neptune_tensorflow_keras",
        "swanlab",
        "tensorboard",
        "traceml",
        "wandb",
    }
)


def is_chief_only(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback is to run on the chief alone."""
    said = getattr(callback, "chief_only", None)
    if said is not None:
        return bool(said)
    packages = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
    return isinstance(callback, _WRITERS) or not packages.isdisjoint(_TRACKERS)


def may_change_model(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback might change the model."""
    return type(callback) not in _READERS and not getattr(callback, "only_reads", False)
