"""Horovod's Keras callbacks: broadcast of the initial state, metrics, learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.groups import agreement
from tfdist.horovod.ranks import rank, size, strategy
from tfdist.model_setup.build import root_cause
from tfdist.step.state import offset
from tfdist.upstream.keras_model import build_for_training, flatten_layers, seeds_of
from tfdist.upstream.keras_optimizers import unwrapped, velocities


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
        self._local = [
            v.value if isinstance(v, keras.Variable) else v
            for v in keras.tree.flatten(local_variables)
            if v is not None
        ]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        steps = strategy().group.gather([self.params.get("steps") or 0])[:, 0]
        if steps.min() < steps.max():
            raise ConfigurationError(
                f"The ranks have {', '.join(f'{n:.0f}' for n in steps)} batches per epoch, so some "
                "would wait forever. Pass the same steps_per_epoch to fit on every rank."
            )
        self._checked = False
        if all(layer.built for layer in flatten_layers(self.model)):
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


def _before_first_call(model: keras.Model, function: Callable[[], None]) -> None:
    """Makes `fit` build the model from its first batch, and call a function before the first step.

    Horovod broadcasts after the first step, for which every rank uses its own initial weights.

    Args:
        model: A model within `fit`, which has created its `train_function`.
        function: Called once, after the model is built.
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


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the metrics in the logs of an epoch by those over the rows of all ranks.

    It sums the states of the metrics over the ranks and computes the results from the sums. This is
    exact for AUC and for shards of any size, for which an average of results is not. The states of
    a metric must be sums over batches, as in Keras's metrics. Put it before callbacks that read
    metrics.

    The variables of the model do not change. `evaluate` outside of `fit` returns the results of its
    rank.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> callbacks = [hvd.callbacks.MetricAverageCallback()]
        >>> history = build_model().fit(x, y, verbose=0, callbacks=callbacks)
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._train: dict[str, Any] | None = None
        self._test: dict[str, Any] = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # The validation within fit is about to reset the training metrics.
        if hasattr(self, "_train") and self._train is None:
            self._train = self._results()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if hasattr(self, "_train"):
            self._test = self._results()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        train = self._results() if self._train is None else self._train
        new = train | {f"val_{name}": value for name, value in self._test.items()}
        if logs is not None:
            logs.update({name: new[name] for name in logs.keys() & new.keys()})
        del self._train

    def _results(self) -> dict[str, Any]:
        variables = self.model.metrics_variables
        sums = strategy().all_reduce([v.value for v in variables])
        with keras.StatelessScope(list(zip(variables, sums, strict=True))):
            results = self.model.get_metrics_result()
        return {name: float(value) for name, value in results.items()}


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    The learning rate is added to the logs of each epoch. With momentum, SGD and RMSprop have a
    velocity that contains earlier learning rates. When the rate changes, the velocity is scaled by
    the same factor (momentum correction; Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    section 3, remark 2).

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> halved = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
        >>> history = build_model().fit(x, y, epochs=2, verbose=0, callbacks=[halved])
        >>> [f"{rate:.2f}" for rate in history.history["learning_rate"]]
        ['0.10', '0.05']

    Args:
        initial_lr: The learning rate to multiply.
        multiplier: A function that returns the factor for an epoch, or a number, whose power of
            the epochs since `start_epoch` is the factor.
        start_epoch: The first epoch with a changed rate, from 0.
        end_epoch: The epoch before which the schedule ends; None for no end.
        staircase: Whether to change the rate once per epoch. If False, it changes with every
            batch, with fractions of epochs.
        momentum_correction: Whether to scale the velocity.
        steps_per_epoch: Batches per epoch; None for those of `fit`.

    Raises:
        ConfigurationError: The optimizer has a `LearningRateSchedule`, or the number of batches is
            unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.steps_per_epoch = initial_lr, steps_per_epoch or 0
        self.start_epoch = start_epoch
        self.end_epoch = float("inf") if end_epoch is None else end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self._multiplier = multiplier

    def multiplier(self, epoch: float) -> float:
        """Returns the factor of the initial rate at an epoch, which may be fractional."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return self._multiplier ** (epoch - self.start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._optimizer = unwrapped(self.model.optimizer)
        if not isinstance(self._optimizer.learning_rate, keras.Variable):
            raise ConfigurationError(
                f"{type(self).__name__} sets the learning rate, but the optimizer has a "
                "LearningRateSchedule. Create the optimizer with a number, or leave out the "
                "callback."
            )
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps") or 0
        if not (self.staircase or self.steps_per_epoch):
            raise ConfigurationError(
                f"{type(self).__name__} changes the rate with each batch, but the number of "
                "batches is unknown. Pass steps_per_epoch to the callback."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch or self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.initial_lr * self.multiplier(self._epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self.initial_lr * self.multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self._optimizer.learning_rate)

    def _set(self, rate: float) -> None:
        before = float(self._optimizer.learning_rate)
        self._optimizer.learning_rate = rate
        if self.momentum_correction and before and rate != before:
            for velocity in velocities(self._optimizer):
                velocity.assign(velocity * (rate / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate with every batch, from `initial_lr / size()` to `initial_lr`.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> rate = 0.1 * hvd.size()
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2)
        >>> history = build_model().fit(x, y, epochs=2, verbose=0, callbacks=[warmup])

    Args:
        initial_lr: The rate after the warm-up, scaled by the number of ranks.
        warmup_epochs: Number of epochs of the warm-up.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: As in `LearningRateScheduleCallback`.
        verbose: If not 0, rank 0 prints a line at the end of the warm-up.

    Raises:
        ConfigurationError: As in `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warmup_factor,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and epoch == self.warmup_epochs - 1:
            rate = float(self._optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished learning rate warm-up to {rate:g}.")

    def _warmup_factor(self, epoch: float) -> float:
        # At the end of the batch, so that the last batch of the warm-up reaches the full rate.
        done = (epoch + 1 / self.steps_per_epoch) / self.warmup_epochs
        return (1 + done * (size() - 1)) / size()
