"""Starts all ranks from the state of one, and checks that they stay together."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.horovod.ranks import rank, size, strategy
from tfdist.step.forward_state import offset
from tfdist.strategies.collectives import same_variables
from tfdist.upstream.keras_model import flatten_layers, seeds_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the state of one before the first step.

    Weights, optimizer with its counters and loss scale, metrics and seeds. Then each rank's seeds
    are moved apart, so that random layers draw other masks on other rows; those of `root_rank`
    stay. Weights that differ between ranks are an error, here and after the first step.

    Args:
        root_rank: Whose state it is: of the rank that loaded a checkpoint, for one.

    Raises:
        ClusterError: The ranks have different models, or weights in spite of the broadcast, or
            part in the first step.
        ConfigurationError: The ranks have different numbers of batches, or the model has no
            weights yet.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model, group = self.model, strategy()
        _build(model)
        variables = model.variables + model.optimizer.variables
        same_variables.broadcast_and_check(group, variables, self.root_rank)
        self._check_steps()
        for seed in seeds_of(model):
            seed.assign(seed + offset(seed, (rank() - self.root_rank) % size()))
        self._checked = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._checked:
            cure = "compile the model with tfdist.horovod.DistributedOptimizer(optimizer)."
            same_variables.check_values(strategy(), self.model.trainable_variables, cure)
            self._checked = True

    def _check_steps(self) -> None:
        steps = strategy().gather([self.params.get("steps") or 0])[:, 0]
        if steps.min() < steps.max():
            raise ConfigurationError(
                f"The ranks have {', '.join(f'{n:.0f}' for n in steps)} batches an epoch: expected "
                "as many on each, or some wait for ever; give fit the same steps_per_epoch."
            )


def _build(model: keras.Model) -> None:
    """Makes sure that there is a state: Keras makes that of the optimizer in the first step."""
    if not all(layer.built for layer in flatten_layers(model)):
        raise ConfigurationError(
            "The model has no weights yet, so there is nothing to broadcast before the first step: "
            "give it a keras.Input, or call it once on a batch."
        )
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
