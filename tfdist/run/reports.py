"""Tables of the training command: start-up, results, and profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist import data as data_sets
from tfdist import schedules
from tfdist.callbacks.step_log import peak_memory
from tfdist.config import TrainConfig
from tfdist.console import tables, units
from tfdist.loops import data_order
from tfdist.run import datasets
from tfdist.run.datasets import num_rows, num_rows_of_first
from tfdist.run.recipe import num_steps
from tfdist.strategies import STRATEGIES
from tfdist.upstream.keras_optimizers import unwrapped

if TYPE_CHECKING:
    from tfdist.callbacks.profile import Profile
    from tfdist.strategies import Strategy
    from tfdist.trainer import Trainer

SMOKE = "three steps of training and of validation"
History = Mapping[str, Sequence[float]]


def what_runs(
    trainer: Trainer,
    config: TrainConfig,
    data: Any,
    unread: Sequence[str],
    smaller: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, str]:
    """Returns the rows of the start-up table, by name."""
    replicas = trainer.strategy.num_replicas
    steps = num_steps(data)
    batch, note = num_rows(data), ""
    if batch is None:
        batch, note = num_rows_of_first(data), " (the first batch)"
    if batch is None:
        batch, note = config.batch_size, ", if the data keep to it"
    elif batch != config.batch_size:
        note += f"; batch_size is {config.batch_size}"
    fewest, most = batch // replicas, -(-batch // replicas)
    rows = {
        "recipe": config.recipe,
        "global batch": f"{batch}{note}",
        "per-replica batch": str(most) if fewest == most else f"{fewest} or {most}",
        "steps per epoch": "unknown until the end of the first epoch"
        if steps is None
        else str(steps),
        "optimizer": optimizer(trainer.model),
    }
    if config.batch_warmup:
        rows["batch warm-up"] = ", ".join(
            "{} rows for {} epochs".format(*stage.split(":")) for stage in config.batch_warmup
        )
    if "learning_rate" not in unread:
        rows["learning rate"] = schedules.describe(config)
    if config.data:
        rows["data"] = data_sets.describe(config)
    if unread:
        rows["no effect"] = f"{', '.join(unread)}: the recipe does not read them"
    if config.checkpoint_every != "never":
        rows["resume"] = data_order.resume_method(data)
    if config.smoke:
        rows["smoke"] = SMOKE
        if smaller:
            reduced = ", ".join(f"{name} {value}" for name, value in smaller.items())
            rows["reduced by --smoke"] = f"{reduced}; flags override these values"
    rows |= datasets.describe_limit(config)
    return rows | trainer.describe(weights=config.show_weights)


def optimizer(model: Any) -> str:
    """Returns the name of a model's optimizer and its learning rate or schedule."""
    used = unwrapped(model.optimizer)
    try:
        rate = used.get_config()["learning_rate"]
    except (KeyError, NotImplementedError):
        return f"{type(used).__name__}, learning rate from a custom schedule"
    if isinstance(rate, Mapping):
        return f"{type(used).__name__}, learning rate {_rule(rate)}"
    return f"{type(used).__name__}, learning rate {float(rate):g}"


def _rule(rate: Mapping[str, Any]) -> str:
    """Returns a serialized schedule in words, including the schedule that it wraps, if any."""
    given = {name: value for name, value in rate["config"].items() if value is not None}
    words = (
        f"{name} {f'({_rule(value)})' if isinstance(value, Mapping) else value}"
        for name, value in given.items()
        if name != "name"
    )
    return f"{rate['class_name']}: {', '.join(words)}"


def summary(
    history: History,
    seconds: float,
    stats: Any,
    run_dir: str,
    stopped: str,
    has_checkpoints: bool,
    of_strategy: Mapping[str, str] = MappingProxyType({}),
    planned: str = "",
    batch: int = 0,
    before: int = 0,
) -> None:
    """Prints the results of a run.

    Args:
        history: The metrics of each epoch, as `keras.callbacks.History.history`.
        seconds: Time of the whole training, validation included.
        stats: Statistics of the trainer, with `examples_per_second` and `data_wait_share`.
        run_dir: The path or URL of the run folder.
        stopped: What stopped the training before its end; empty if it completed.
        has_checkpoints: Whether the run can be resumed.
        of_strategy: Rows of the strategy.
        planned: Memory and time of a step that `tfdist plan auto` predicted, if it did.
        batch: Global batch size.
        before: Bytes of `peak_memory` before the model was built.
    """
    rows = {}
    if stopped:
        rows["stopped"] = stopped
        rows["latest weights"] = "model.keras"
        if has_checkpoints:
            rows["to resume"] = f"the same command with --run-dir {run_dir} --resume auto"
    judge = "val_loss" if history.get("val_loss") else "loss"
    if losses := history.get(judge):
        best = min(range(len(losses)), key=lambda epoch: losses[epoch])
        rows[f"last epoch ({len(losses)})"] = _metrics(history, len(losses) - 1)
        rows[f"lowest {judge} (epoch {best + 1})"] = _metrics(history, best)
    rows["time"] = f"{seconds:.1f} s"
    rows["speed of the last epoch"] = (
        f"{stats.examples_per_second:.0f} rows/s, {stats.data_wait_share:.0%} waiting for data"
    )
    if use := stats.gpu_use:
        memory = units.format_bytes(use.memory)
        rows["GPUs in the last epoch"] = f"{use.busy:.0%} busy, {memory} on the fullest"
    if planned:
        memory = units.format_bytes(peak_memory() - before)
        step = 1e3 * batch / max(stats.examples_per_second, 1e-9)
        rows |= {"planned": planned, "measured": f"{memory} for the run, {step:.3g} ms a step"}
    tables.facts({**rows, **of_strategy, "run folder": run_dir}.items())


def measure_exchange(strategy: Strategy, model: Any) -> tuple[float, float] | None:
    """Measures an all-reduce of the gradients without other computation.

    All workers call it together.

    Returns:
        Seconds and bytes; None if there is no synchronous all-reduce.
    """
    from tfdist.groups.traffic import measure_all_reduce

    if strategy.num_replicas == 1 or STRATEGIES[strategy.name].asynchronous:
        return None
    num_bytes = sum(4 * int(np.prod(w.shape)) for w in model.trainable_variables)
    return measure_all_reduce(strategy, num_bytes)[0], num_bytes


def print_profile(profile: Profile, exchanged: tuple[float, float] | None) -> None:
    """Prints the table."""
    rows = profile_table(profile, exchanged)
    if not rows:
        tables.text(
            "profile: no steps to measure: the first two calls start up, "
            f"{profile.traced} steps were traced, and no steps followed. Train for more steps."
        )
        return
    tables.numbers(("a step", "ms", "share"), rows)
    words = f"over {profile.seconds.steps} steps; {profile.traced} others are in the trace"
    if exchanged:
        words += (
            f"; the all-reduce of {exchanged[1] / 1e6:.3g} MB of gradients was measured "
            "separately, and includes time that overlaps with computation"
        )
    tables.text(f"{words}.")


def profile_table(
    profile: Profile, exchanged: tuple[float, float] | None
) -> list[tuple[str, str, str]]:
    """Returns rows of a name, milliseconds per step, and the fraction of the step."""
    taken = profile.seconds
    if not taken.steps:
        return []
    alone = min(exchanged[0] if exchanged else 0.0, (taken.in_calls - taken.waited) / taken.steps)
    parts = {
        "computing": (taken.in_calls - taken.waited) / taken.steps - alone,
        "exchange": alone,
        "data": taken.waited / taken.steps,
        "Python": taken.around / taken.steps,
    }
    total = sum(parts.values())
    parts["all"] = total
    return [(name, f"{s * 1e3:.3f}", f"{s / total:.0%}") for name, s in parts.items()]


def _metrics(history: History, epoch: int) -> str:
    """Returns the metrics of one epoch: those of the validation, if there is one."""
    validated = {name: curve for name, curve in history.items() if name.startswith("val_")}
    # With validation_freq above 1, a validation curve is shorter and its epochs are unknown here.
    curves = validated or history
    return ", ".join(
        f"{name} {float(curve[epoch]):.4f}" for name, curve in curves.items() if epoch < len(curve)
    )
