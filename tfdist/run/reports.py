"""What the training command shows before and after: tables of facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tfdist import schedules
from tfdist.config import TrainConfig
from tfdist.console import tables

if TYPE_CHECKING:
    from tfdist.trainer import Trainer

History = Mapping[str, Sequence[float]]


def start(
    trainer: Trainer, config: TrainConfig, steps_per_epoch: int | None, run_dir: Path
) -> None:
    """Shows what is about to run.

    Args:
        trainer: Describes itself and its strategy.
        config: Gives the recipe, the batch and the learning-rate rule.
        steps_per_epoch: The global batches of an epoch; None where the data do not tell.
        run_dir: Where the run's files go.
    """
    replicas = trainer.strategy.num_replicas
    fewest, most = config.batch_size // replicas, -(-config.batch_size // replicas)
    rows = {
        "recipe": config.recipe,
        "global batch": str(config.batch_size),
        "per-replica batch": str(most) if fewest == most else f"{fewest} or {most}",
        "steps per epoch": "unknown until the first has ended"
        if steps_per_epoch is None
        else str(steps_per_epoch),
        "learning rate": schedules.describe(config),
        **trainer.describe(),
        "run folder": str(run_dir),
    }
    if config.smoke:
        rows["smoke"] = "three steps of training and of validation"
    tables.facts(rows.items())


def summary(
    history: History,
    seconds: float,
    stats: Any,
    run_dir: Path,
    interrupted: bool,
    of_strategy: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Shows what came out.

    Args:
        history: The metrics of each epoch, as `keras.callbacks.History.history`.
        seconds: Time of the whole training, validation included.
        stats: The trainer's, with `examples_per_second` and `data_wait_share`.
        run_dir: Where the run's files are.
        interrupted: Whether the user stopped it.
        of_strategy: What the strategy has to say.
    """
    rows = {}
    if interrupted:
        rows["stopped"] = "by an interrupt; model.keras holds the last state"
    judge = "val_loss" if history.get("val_loss") else "loss"
    if losses := history.get(judge):
        best = min(range(len(losses)), key=lambda epoch: losses[epoch])
        rows[f"last epoch ({len(losses)})"] = _metrics(history, len(losses) - 1)
        rows[f"lowest {judge} (epoch {best + 1})"] = _metrics(history, best)
    rows["time"] = f"{seconds:.1f} s"
    rows["speed of the last epoch"] = (
        f"{stats.examples_per_second:.0f} rows/s, {stats.data_wait_share:.0%} waiting for data"
    )
    tables.facts({**rows, **of_strategy, "run folder": str(run_dir)}.items())


def _metrics(history: History, epoch: int) -> str:
    """The metrics of one epoch: those of the validation, where there is one."""
    validated = {name: curve for name, curve in history.items() if name.startswith("val_")}
    # With validation_freq above 1 a validation curve is shorter, and its epochs are not known here.
    curves = validated or history
    return ", ".join(
        f"{name} {float(curve[epoch]):.4f}" for name, curve in curves.items() if epoch < len(curve)
    )
