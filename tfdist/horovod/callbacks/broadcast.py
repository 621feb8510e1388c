"""Broadcasts the state of one rank before training, and checks that the ranks stay equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.groups import agreement
from tfdist.horovod.ranks import rank, size, strategy
from tfdist.model_setup.build import root_cause
from tfdist.step.state import offset
from tfdist.upstream.keras_model import build_for_training, flatten_layers, seeds_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the state of one rank to all ranks before the first step.

    The state consists of the weights, the optimizer with its counters and loss scale, metrics, and
    seeds. Afterwards the seeds of all ranks but `root_rank` are offset, so that random layers draw
    different numbers on each rank. The weights are compared between ranks after the broadcast and
    after the first step.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> model = build_model()
        >>> model.optimizer = hvd.DistributedOptimizer(model.optimizer)
        >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        >>> history = model.fit(x, y, verbose=0, callbacks=callbacks)

    Args:
        root_rank: The rank to broadcast from, such as the one that loaded a checkpoint.
        device: Ignored; accepted for compatibility with Horovod.
        local_variables: Variables that are not broadcast.

    Raises:
        ClusterError: The ranks have different models, or different weights after the broadcast or
            after the first step.
        ConfigurationError: The ranks have different numbers of batches.
        UnsupportedModelError: The model cannot be built from the shapes of its first batch.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self._local = [_plain(v) for v in keras.tree.flatten(local_variables) if v is not None]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._check_steps()
        self._checked = False
        if _is_built(self.model):
            self._broadcast()
        else:
            _before_first_call(self.model, self._broadcast)

    def _broadcast(self) -> None:
        model = self.model
        if not model.optimizer.built:  # otherwise Keras builds it in the first step
            model.optimizer.build(model.trainable_variables)
        variables = self._shared(model.variables + model.optimizer.variables)
        agreement.broadcast_and_check(strategy().group, variables, self.root_rank)
        for seed in self._shared(seeds_of(model)):
            seed.assign(seed + offset(seed, (rank() - self.root_rank) % size()))

    def _shared(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        return [v for v in variables if not any(v.value is local for local in self._local)]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._checked:
            fix = "compile the model with tfdist.horovod.DistributedOptimizer(optimizer)."
            variables = self._shared(self.model.trainable_variables)
            agreement.check_values(strategy().group, variables, fix)
            self._checked = True

    def _check_steps(self) -> None:
        steps = strategy().group.gather([self.params.get("steps") or 0])[:, 0]
        if steps.min() < steps.max():
            raise ConfigurationError(
                f"The ranks have {', '.join(f'{n:.0f}' for n in steps)} batches per epoch, so some "
                "would wait forever. Pass the same steps_per_epoch to fit on every rank."
            )


def _plain(variable: keras.Variable | tf.Variable) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _is_built(model: keras.Model) -> bool:
    """Returns whether all layers have created their weights."""
    return all(layer.built for layer in flatten_layers(model))


def _before_first_call(model: keras.Model, function: Callable[[], None]) -> None:
    """Makes `fit` build the model from its first batch, and call a function before the first step.

    Horovod broadcasts after the first step, for which every rank uses its own initial weights.

    Args:
        model: A model within `fit`, which has created its `train_function`.
        function: Called once, after the model is built.

    Raises:
        UnsupportedModelError: In the first step, if the model cannot be built.
    """
    train_function = model.train_function

    def first(iterator: Any) -> Any:
        model.train_function = train_function
        try:
            build_for_training(model, iterator.element_spec)
        except Exception as error:
            raise UnsupportedModelError(
                "The model has no weights to broadcast, and cannot be built from the data's shapes "
                f"({root_cause(error)}). Add a keras.Input, or call the model once on a batch."
            ) from error
        function()
        return train_function(iterator)

    model.train_function = first
