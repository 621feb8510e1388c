"""Repeats steps of a run, and examines the last one."""

from __future__ import annotations

import dataclasses
import math
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import pipelines
from pipelines import show as show_records
from tfdist.checkpoint.store import Store
from tfdist.config import TrainConfig
from tfdist.console import tables
from tfdist.errors import ConfigurationError
from tfdist.replica.program_state import ProgramState
from tfdist.run import from_config, recipe
from tfdist.run.folder import RunFolder
from tfdist.run.records import read_rows
from tfdist.upstream.keras_model import metrics_variables_of
from tfdist.upstream.keras_optimizers import optimizers_of, variables_of

#: More rows of a batch are not examined one by one, and more weights are not shown.
_MOST_ROWS, _MOST_WEIGHTS = 1024, 12


class _StepDone(Exception):  # noqa: N818 - it is no error
    """Ends the training after the step."""


def replay(run: Path, config: TrainConfig, step: int) -> LastStep:
    """Repeats the steps of a run from its nearest checkpoint, and returns the last one.

    Raises:
        TfdistError: The run has no such step, or cannot be repeated.
    """
    rows = read_rows(run)
    num_steps = max((row["step"] for row in rows), default=step)
    if step > num_steps:
        raise ConfigurationError(f"--step {step}: {run} has {num_steps} steps.")
    store = Store(run / "checkpoints")
    place = next((place for place in store.places() if place.step < step), None)
    workload = recipe.find(config.recipe)
    keras.utils.set_random_seed(config.seed)
    strategy = from_config.make_strategy(config)
    data, validation = from_config.make_data(config, workload, strategy)
    trainer = from_config.make_trainer(config, workload, strategy, recipe.num_steps(data))
    trainer.checkpoints = from_config.make_checkpoints(config, f"{config.run_dir}/saved")
    if trainer.checkpoints is not None and place is not None:
        trainer.checkpoints = dataclasses.replace(trainer.checkpoints, resume=store.path(place))
    skipped = RunFolder(run).skipped_steps()
    trainer.skipped_steps = [(first, last) for first, last in skipped if last < step]
    logged = {row["step"]: row for row in rows if "epoch" not in row and "loss" in row}
    last = LastStep(step, place.step if place else 0, logged, pipelines.restart_of(data))
    last.facts = {
        "run": str(run),
        "from": "the start of training" if place is None else f"the checkpoint {place.name}",
        "strategy": f"{strategy.name}, {strategy.num_replicas} replicas",
    }
    callbacks = from_config.make_callbacks(config, workload)
    try:
        trainer.fit(
            data,
            validation_data=validation,
            callbacks=[*from_config.averages(config), *callbacks, last],
            **from_config.fit_arguments(config, data, validation),
        )
    except _StepDone:
        return last
    raise ConfigurationError(f"--step {step}: the repeated run has {last.num_done} steps.")


class LastStep(keras.callbacks.Callback):
    """Compares each step with the run's rows, examines the last one, and ends the training.

    Attributes:
        facts: The place of the last step, and its numbers.
        differences: The largest relative difference to the run's rows, by name of the value.
        num_compared: Number of steps that the run has logged.
        gradients: The norm of each weight's gradient.
        non_finite: The first value that is NaN or infinite; empty if there is none.
        rows: The loss of each row of the batch.
        records: The record of each row; None if they are not known.
    """

    only_reads = True

    def __init__(self, step: int, num_done: int, logged: Mapping[int, Any], restart: Any) -> None:
        super().__init__()
        self._step, self.num_done, self._logged, self._restart = step, num_done, logged, restart
        self.facts: dict[str, str] = {}
        self.differences: dict[str, float] = {}
        self.num_compared, self.non_finite = 0, ""
        self.gradients: dict[str, float] = {}
        self.rows: list[float] = []
        self.records: list[pipelines.Record] | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.num_done + 1 != self._step:
            return
        self.facts["step"] = f"{self._step}: batch {batch + 1} of epoch {self._epoch + 1}"
        if self._restart is None:
            return
        (arrays,) = self._restart.dataset(lambda: (self._epoch, batch)).take(1)
        variables = [*self.model.variables, *metrics_variables_of(self.model)]
        variables += [v for one in optimizers_of(self.model) for v in variables_of(one)]
        state = ProgramState(self.model, variables)
        try:
            self._examine(*keras.utils.unpack_x_y_sample_weight(arrays))
        finally:
            state.restore()
        self.records = self._restart.records(self._epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_done += 1
        row = self._logged.get(self.num_done, {})
        self.num_compared += bool(row)
        for name in logs.keys() & row.keys():
            now, before = float(logs[name]), math.nan if row[name] is None else row[name]
            is_same = now == before or not (math.isfinite(now) or math.isfinite(before))
            difference = 0.0 if is_same else abs(now - before) / max(abs(before), 1e-12)
            self.differences[name] = max(self.differences.get(name, 0.0), difference)
        if self.num_done == self._step:
            self.facts |= {name: f"{value:.6g}" for name, value in logs.items()}
            raise _StepDone

    def _examine(self, x: Any, y: Any, weight: Any) -> None:
        """Computes the gradients of a batch and each row's loss, and finds what is not finite."""
        model, weights = self.model, self.model.trainable_variables
        inputs = {"the inputs": x, "the labels": y}
        inputs |= {f"the weight {v.path}": v.value for v in model.variables}
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
        for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            if gradient is not None:
                self.gradients[variable.path] = float(tf.linalg.global_norm([gradient]))
        self.facts["loss of the batch"] = f"{float(loss):.6g}"
        gradients = {f"the gradient of {name}": norm for name, norm in self.gradients.items()}
        self.non_finite = _first_non_finite(
            inputs | _outputs_of_layers(model, x) | {"the loss": loss} | gradients
        )
        for i in range(min(len(tf.nest.flatten(x)[0]), _MOST_ROWS)):
            xi, yi, wi = keras.tree.map_structure(
                lambda leaf, i=i: None if leaf is None else leaf[i : i + 1], (x, y, weight)
            )
            outputs = model(xi, training=False)
            loss = model.compute_loss(x=xi, y=yi, y_pred=outputs, sample_weight=wi, training=False)
            self.rows.append(float(loss))


def _outputs_of_layers(model: keras.Model, x: Any) -> dict[str, Any]:
    """Returns the outputs of the layers of a functional model, in their order."""
    if not isinstance(model, keras.models.Sequential) and not hasattr(model, "operations"):
        return {}
    layers = [one for one in model.layers if not isinstance(one, keras.layers.InputLayer)]
    outputs = keras.Model(model.inputs, [[one.output] for one in layers])(x, training=True)
    return {f"the output of {one.name}": out for one, out in zip(layers, outputs, strict=True)}


def _first_non_finite(values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        arrays = [np.asarray(leaf) for leaf in tf.nest.flatten(value) if leaf is not None]
        if not all(np.isfinite(one).all() for one in arrays if one.dtype.kind == "f"):
            return name
    return ""


def show(last: LastStep, num_worst: int, picture: str | None) -> None:
    """Prints a step."""
    gradients = sorted(last.gradients.items(), key=lambda one: -_size(one[1]))
    if not last.num_compared:
        verdict = "the run logged none of these steps; --log-every N chooses them"
    else:
        steps = f"over {last.num_compared} logged steps"
        metric, largest = max(last.differences.items(), key=lambda one: one[1], default=("", 0.0))
        if not largest:
            verdict = f"equal, bit for bit, {steps}"
        else:
            verdict = f"largest relative difference {largest:.1e}, {metric}, {steps}"
    tables.facts(
        last.facts.items(),
        [("compared with the run", verdict)],
        [("first non-finite value", last.non_finite or "none")],
        [(f"gradient of {name}", f"{norm:.4g}") for name, norm in gradients[:_MOST_WEIGHTS]],
    )
    worst = sorted(range(len(last.rows)), key=lambda i: -_size(last.rows[i]))[:num_worst]
    chosen = [last.records[i] for i in worst] if last.records else []
    if not chosen:
        tables.text(
            "The records of the batch are not known: the data are not those of pipelines.read, or "
            "are cached, limited or mixed."
        )
        return
    index = pipelines.load_index(posixpath.dirname(chosen[0].file))
    rows = []
    for i, record in zip(worst, chosen, strict=True):
        values = show_records.describe_record(record.serialized, index).items()
        place = f"{posixpath.basename(record.file)} {record.position}"
        rows.append((f"{last.rows[i]:.4g}", place, ", ".join(f"{k} {v}" for k, v in values)))
    tables.facts([("loss", "shard and record", "values"), *rows])
    serialized = [one.serialized for one in chosen]
    if picture and show_records.contact_sheet(serialized, index, Path(picture)):
        tables.text(f"Images of these records: {picture}")


def _size(number: float) -> float:
    return number if math.isfinite(number) else math.inf
