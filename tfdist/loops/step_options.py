"""How the steps of a trainer are made, beyond what model and strategy say."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.precision import LossScale


@dataclass(frozen=True)
class StepOptions:
    """As `Trainer` takes them.

    Attributes:
        accumulate: Rounds of a training step.
        sync_batch_norm: Whether BatchNorm takes global moments.
        precision: Name of the dtype policy to build with; None: Keras's global one.
        loss_scale: How the loss scale moves; None: as the optimizer says.
        recompute: Which layers are computed again on the way back.
    """

    accumulate: int = 1
    sync_batch_norm: bool = False
    precision: str | None = None
    loss_scale: LossScale | None = None
    recompute: str = "none"
