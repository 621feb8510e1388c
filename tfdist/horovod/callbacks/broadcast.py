"""Starts all ranks from the state of one, and checks that they stay together."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.groups import agreement
from tfdist.horovod.first_call import before_first_call, is_built
from tfdist.horovod.ranks import rank, size, strategy
from tfdist.step.state import offset
from tfdist.upstream.keras_model import seeds_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the state of one before the first step.

    Weights, optimizer with its counters and loss scale, metrics and seeds. Then each rank's seeds
    are moved apart, so that random layers draw other masks on other rows; those of `root_rank`
    stay. Weights that differ between ranks are an error, here and after the first step.

    Args:
        root_rank: Whose state it is: of the rank that loaded a checkpoint, for one.
        device: Horovod's argument; what crosses is where the variables are.
        local_variables: Variables that stay as they are on each rank.

    Raises:
        ClusterError: The ranks have different models, or weights in spite of the broadcast, or
            part in the first step.
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
        if is_built(self.model):
            self._broadcast()
        else:
            before_first_call(self.model, self._broadcast)

    def _broadcast(self) -> None:
        model = self.model
        if not model.optimizer.built:  # Keras does that in the first step
            model.optimizer.build(model.trainable_variables)
        variables = self._shared(model.variables + model.optimizer.variables)
        agreement.broadcast_and_check(strategy().group, variables, self.root_rank)
        for seed in self._shared(seeds_of(model)):
            seed.assign(seed + offset(seed, (rank() - self.root_rank) % size()))

    def _shared(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        return [v for v in variables if not any(v.value is local for local in self._local)]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._checked:
            cure = "compile the model with tfdist.horovod.DistributedOptimizer(optimizer)."
            variables = self._shared(self.model.trainable_variables)
            agreement.check_values(strategy().group, variables, cure)
            self._checked = True

    def _check_steps(self) -> None:
        steps = strategy().gather([self.params.get("steps") or 0])[:, 0]
        if steps.min() < steps.max():
            raise ConfigurationError(
                f"The ranks have {', '.join(f'{n:.0f}' for n in steps)} batches an epoch: expected "
                "as many on each, or some wait for ever; give fit the same steps_per_epoch."
            )


def _plain(variable: keras.Variable | tf.Variable) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable
