"""Checks that the workers of a run, and the replicas of each process, do not diverge.

All workers must have the same model, optimizer and weights, but each runs its own copy of the
script. Before the first step, they compare configurations. For every call of the inner loop, they
compare hyperparameters in the all-gather that follows the previous call and its callbacks. A
separate all-gather is needed if callbacks run after it: before the first call of an epoch, and
before every call if a callback overrides `on_train_batch_begin`. The workers also compare all
variables bitwise: when a model is trained again, after each epoch, before checkpoints, and at
intervals.

Each of n workers receives up to three numbers from each worker per comparison: O(n). Descriptions
are exchanged before an error only, and take O(n) bytes as well.

Each replica of `mirrored` updates variables of its own, by the same sums. Code of the user may
update them differently: by their names, by random numbers, or by Python state. They are compared by
the sums of their bits, which each device computes itself, before callbacks run, which change the
first replica's variables only.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import google_crc32c
import keras
import numpy as np

from tfdist.errors import ClusterError, UnsupportedModelError
from tfdist.groups import agreement
from tfdist.loops.callbacks import may_change_model
from tfdist.loops.epoch import Call, Epoch, Observer
from tfdist.loops.observers import RunContext
from tfdist.loops.steps_per_call import runs_before_batches
from tfdist.model_setup import configuration
from tfdist.strategies.base import Strategy
from tfdist.strategies.inner_loop import LoopResult
from tfdist.strategies.mirrored_variables import first_difference
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.keras_variables import is_elsewhere

#: Compare the variables after every call; at intervals, with little overhead; or compare nothing.
CheckRanks = Literal["every-call", "auto", "off"]

#: The fraction of the training time that comparing variables between epochs may take.
_COST = 0.01
_BEGINNING = "the beginning of training"
_FIX = (
    "A callback or other code changed it on some ranks only. Make the same change on every rank, "
    "and set chief_only = False on callbacks that otherwise run only on the chief."
)
#: Maximum number of elements of a variable to send for the size of a difference in a message.
_MAX_SENT = 1 << 22


def check_modes(strategy: Strategy, mode: CheckRanks) -> None:
    """Checks that all workers compare alike. All workers must call it.

    Raises:
        ClusterError: They have other values of `check_ranks`.
    """
    choices = get_args(CheckRanks)
    modes = strategy.group.gather([choices.index(mode)])[:, 0]
    if not _are_same(modes):
        raise ClusterError(
            f"The ranks have check_ranks set to {', '.join(choices[int(m)] for m in modes)}, by "
            "rank. Set the same value on all ranks."
        )


class RankChecks(Observer):
    """Compares the workers of one trainer."""

    def __init__(self, run: RunContext, mode: CheckRanks, options: Mapping[str, Any]) -> None:
        self._model, self._strategy, self._functions = run.model, run.strategy, run.functions
        self._mode, self._options = mode, options
        self._epoch_name = ""  # before the first epoch
        self._step = 0
        # Whether callbacks may change the model before each call, or only before the next one.
        self._changes_before_calls, self._may_have_changed = False, True
        self._hyperparameters: dict[str, Any] = {}
        self._optimizers: list[tuple[str, keras.optimizers.Optimizer, list[str]]] = []
        self._layers: list[tuple[str, keras.layers.Layer]] = []
        # Whether the next all-gather compares the variables, which rank 0 decides; whether the last
        # one did; and whether a checkpoint requires it.
        self._is_due, self._has_compared, self._is_requested = True, False, False
        self._digests: list[int] = []
        self._seconds_since, self._cost = 0.0, 0.0
        self._agreed_at = _BEGINNING

    # ---- configuration ----

    def compare_configurations(
        self, options: Mapping[str, Any], callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> None:
        """Checks that all workers have the same configuration. All workers must call it.

        Each of n workers receives O(n) bytes: three numbers per worker, and descriptions only if
        the configurations differ.

        Raises:
            ClusterError: The configurations differ.
        """
        changes = any(runs_before_batches(c) and may_change_model(c) for c in callbacks)
        description = configuration.describe(self._model, {**self._options, **options})
        digest = _combined(sorted(description.items()))
        rows = self._strategy.group.gather([digest, changes])
        # If one worker has such a callback, all workers must take part in the all-gathers.
        self._changes_before_calls = bool(rows[:, 1].any())
        if _are_same(rows[:, 0]):
            return
        difference = configuration.first_difference(
            self._strategy.group.gather_objects(description)
        )
        if difference is not None:
            raise ClusterError(
                f"The ranks are configured differently: {difference}. Run the same code with the "
                "same versions and options on every rank."
            )

    # ---- hyperparameters and variables, before and after each call ----

    def begin_training(self) -> None:
        """Compares the variables if the model was trained before. All workers must call it.

        Code between two calls of `fit` may have changed them. In the first call, all workers get
        the variables of rank 0.

        Raises:
            ClusterError: The variables differ.
        """
        self._epoch_name = ""
        if self._agreed_at != _BEGINNING:
            self._agreed_at = "the end of the previous training"
            self.compare_variables()

    def begin_epoch(self, epoch: Epoch) -> None:
        self._epoch_name = epoch.name
        self._layers = [
            (f"trainable of layer {number} ({type(layer).__name__})", layer)
            for number, layer in enumerate(keras_model.flatten_layers(self._model))
        ]
        self._optimizers = [
            (f"optimizer {number + 1}" if number else "optimizer", optimizer, _settable(optimizer))
            for number, optimizer in enumerate(keras_optimizers.optimizers_of(self._model))
        ]
        self._may_have_changed = True

    def begin_call(self, step: int) -> None:
        if not (self._may_have_changed or self._changes_before_calls):
            return
        self._step, self._may_have_changed = step, False
        if not _are_same(self._strategy.group.gather([self._take_hyperparameters()])):
            self._raise_other_hyperparameters()

    def end_call(self, call: Call) -> None:
        self._seconds_since += call.seconds
        self._step = call.last_step + 1

    def columns(self, result: LoopResult) -> list[float]:
        values = self._take_digest() if self._is_due else 0.0
        seconds = 0.0 if self._is_due else self._seconds_since
        is_due_next = (
            self._mode == "every-call" or self._is_requested or seconds * _COST > self._cost
        )
        return [self._take_hyperparameters(), values, is_due_next]

    def compare(self, rows: np.ndarray) -> None:
        if not _are_same(rows[:, 0]):
            self._raise_other_hyperparameters()
        if not _are_same(rows[:, 1]):
            self._raise_other_variables()
        self._has_compared = self._is_due
        if self._is_due:
            self._note_agreement()
        self._is_due = bool(rows[0, 2])

    def compare_variables(self) -> None:
        """Compares the variables now. All workers must call it.

        Each of n workers receives n numbers. If there is a difference, it also receives n numbers
        per variable, and the values of the first variable that differs.

        Raises:
            ClusterError: The variables differ.
        """
        if not _are_same(self._strategy.group.gather([self._take_digest()])):
            self._raise_other_variables()
        self._note_agreement()

    def have_compared(self) -> bool:
        """Returns whether the variables were compared after the last call, or else requests it.

        For checkpoints at times that rank 0 chooses by its clock.
        """
        self._is_requested |= not self._has_compared
        return self._has_compared

    def interrupted(self) -> None:
        self.compare_variables()

    def _note_agreement(self) -> None:
        at_step = f"step {self._step} of {self._epoch_name}"
        self._agreed_at = at_step if self._epoch_name else _BEGINNING
        self._seconds_since, self._is_requested = 0.0, False

    # ---- what is compared ----

    def _take_hyperparameters(self) -> float:
        """Returns a hash of the hyperparameters, which are kept for a message."""
        current: dict[str, Any] = {}
        for name, optimizer, settings in self._optimizers:
            inner = keras_optimizers.unwrapped(optimizer)
            for setting in settings:
                current[f"{name} / {setting}"] = getattr(inner, setting)
            if (rate := keras_optimizers.learning_rate_variable(optimizer)) is not None:
                current[f"{name} / learning_rate"] = float(np.asarray(rate.value))
            if (scale := getattr(optimizer, "dynamic_scale", None)) is not None:
                current[f"{name} / dynamic_scale"] = float(np.asarray(scale.value))
        current.update((name, layer.trainable) for name, layer in self._layers)
        self._hyperparameters = current
        return _combined(list(self._hyperparameters.items()))

    def _variables(self) -> list[keras.Variable]:
        by_owner = self._functions.variables()
        return [
            variable
            for owner, variables in by_owner.items()
            if owner not in ("metrics", "steps")
            for variable in variables
            if not is_elsewhere(variable) and variable.dtype != "string"
        ]

    def _take_digest(self) -> float:
        """Returns a hash of the values of all variables, and measures the time of that."""
        began = time.perf_counter()
        values = (np.asarray(variable.value) for variable in self._variables())
        self._digests = [int(google_crc32c.value(value.tobytes())) for value in values]
        digest = _combined(self._digests)
        self._cost = time.perf_counter() - began
        return digest

    # ---- messages ----

    def _raise_other_hyperparameters(self) -> None:
        by_rank = self._strategy.group.gather_objects(self._hyperparameters)
        rank, name = next(
            (rank, name)
            for rank, other in enumerate(by_rank)
            for name in {**by_rank[0], **other}
            if repr(by_rank[0].get(name)) != repr(other.get(name))
        )
        first, other = (by_rank[i].get(name) for i in (0, rank))
        raise ClusterError(
            f"{name} is {first} on rank 0 and {other} on rank {rank} before step {self._step + 1} "
            f"of {self._epoch_name}. {_FIX}"
        )

    def _raise_other_variables(self) -> None:
        rows = self._strategy.group.gather(self._digests)
        unequal = np.flatnonzero((rows != rows[0]).any(0))
        variable = self._variables()[unequal[0]]
        ranks = np.flatnonzero(rows[:, unequal[0]] != rows[0, unequal[0]]).tolist()
        at_step = f"after step {self._step} of {self._epoch_name}"
        when = at_step if self._epoch_name else f"at {_BEGINNING}"
        local, difference = np.asarray(variable.value), ""
        if local.size <= _MAX_SENT:
            gathered = self._strategy.group.gather_objects(local)  # by all workers
            values = [np.asarray(value, np.float64) for value in gathered]
            largest = max(float(np.max(np.abs(values[rank] - values[0]))) for rank in ranks)
            difference = f", by up to {largest:.3g}"
        raise ClusterError(
            f"{len(unequal)} of {rows.shape[1]} variables differ between ranks {when}. "
            f"The first one is {variable.path!r} on {agreement.names_of(ranks)}"
            f"{difference}. They were last equal at "
            f"{self._agreed_at}. {_FIX}"
        )


class ReplicaChecks(Observer):
    """Compares the variables of the replicas after calls of the inner loop.

    After the first call, after the last one of a training, and otherwise as often as
    takes at most 1% of the time.
    """

    def __init__(self, run: RunContext, mode: CheckRanks) -> None:
        self._functions, self._mode = run.functions, mode
        self._seconds, self._cost = 0.0, -1.0  # a negative cost makes the first comparison due

    def begin_epoch(self, epoch: Epoch) -> None:
        self._epoch = epoch

    def end_call(self, call: Call) -> None:
        self._seconds += call.seconds
        ends = self._epoch.is_last and call.last_step + 1 == self._epoch.data.num_batches
        if ends or self._mode == "every-call" or self._seconds * _COST > self._cost:
            began = time.perf_counter()
            groups = self._functions.variables().values()
            different = first_difference([v for g in groups for v in g if v.dtype != "string"])
            self._seconds, self._cost = 0.0, time.perf_counter() - began
            if different is not None:
                raise UnsupportedModelError(
                    f"{different.variable.path!r} differs between replicas of this process "
                    f"after step {call.last_step + 1} of {self._epoch.name}, by up to "
                    f"{different.largest:.3g} on {different.device}. Code of the model or of its "
                    "optimizer updates it differently on each replica: it must not depend on "
                    "Python state, devices, or random numbers of its own."
                )


def _settable(optimizer: keras.optimizers.Optimizer) -> list[str]:
    inner = keras_optimizers.unwrapped(optimizer)
    # Not those of `get_config`, which a custom learning rate schedule need not have.
    parameters = {n for kind in type(inner).__mro__ for n in inspect.signature(kind).parameters}
    return [
        n for n, value in vars(inner).items() if n in parameters and isinstance(value, (int, float))
    ]


def _combined(values: Sequence[Any]) -> float:
    return agreement.digest(repr(values).encode())


def _are_same(column: np.ndarray) -> bool:
    """Returns whether all workers have the same number."""
    return bool((column == column[0]).all())
