"""Distributes Keras scripts that do not mention tfdist: `distribute`, `python -m tfdist.script`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.checkpoint.settings import Checkpoints
    from tfdist.loops.self_check import Verify
    from tfdist.strategies.base import Strategy


@dataclass(frozen=True)
class Options:
    """How the models of a script are trained: the arguments of `distribute`."""

    strategy: str | Strategy = "auto"
    devices: int | str | Sequence[str] | None = None
    accumulate: int = 1
    sync_batch_norm: bool = False
    remat: str = "none"
    checkpoints: Checkpoints | None = None
    fallback: bool = False
    verify: Verify = None
    log_every: int | str | None = None


def distribute(
    strategy: str | Strategy | None = "auto",
    devices: int | str | Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Makes `fit`, `evaluate` and `predict` of all Keras models run under a strategy.

    `train_on_batch`, `test_on_batch` and `predict_on_batch` do too. Every model stays the same
    object, with its weights, optimizer, metrics and callbacks.

    Example:
        >>> tfdist.distribute("mirrored", devices=2)
        >>> model = build_model()
        >>> history = model.fit(x, y, batch_size=64, epochs=2, verbose=0)  # on two replicas
        >>> tfdist.distribute(None)  # plain Keras again

    Args:
        strategy: As for `Trainer`, or an object of `keras.distribution`. None ends the distribution
            and restores all methods of Keras.
        devices: As for `Trainer`.
        **options: `accumulate`, `sync_batch_norm`, `remat`, `verify` and `checkpoints` as for
            `Trainer`. Each `fit` saves checkpoints in a folder of its own. `fallback=True` trains a
            model that tfdist refuses on one device, with a warning. `log_every`, a number of steps
            or `"auto"`, is as for `Trainer`, and the N-th `fit` writes `metrics-N.jsonl`.

    Raises:
        TfdistError: The strategy cannot be created. The message explains the fix.
    """
    runner = importlib.import_module("tfdist.script.runner")
    runner.stop()
    if strategy is None:
        return
    try:
        runner.start(Options(strategy, devices, **options)).connect()
    except BaseException:
        runner.stop()
        raise
