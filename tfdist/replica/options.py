"""The options of a trainer's steps."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.precision import LossScale


@dataclass(frozen=True)
class StepOptions:
    """The arguments of a `Trainer` that say how its steps compute.

    Attributes:
        accumulate: Number of rounds in which a training step computes its batch.
        sync_batch_norm: Whether BatchNorm uses the moments of the global batch in training.
        precision: Name of the dtype policy to build the model with; None for Keras's global one.
        loss_scale: How the loss scale changes; None for the optimizer's own rule.
        remat: The layers to rematerialize, as in `Trainer(remat=...)`.
        replica_random: Whether each replica draws its own random numbers.
    """

    accumulate: int = 1
    sync_batch_norm: bool = False
    precision: str | None = None
    loss_scale: LossScale | None = None
    remat: str = "none"
    replica_random: bool = False
