"""How the model is trained, and in which formats of numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt


class Optimisation(BaseModel):
    """How the model is trained."""

    epochs: PositiveInt = Field(10, description="passes over the training data")
    batch_size: PositiveInt = Field(
        64, description="global batch: examples per optimizer step over all replicas"
    )
    batch_warmup: list[Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")]] | None = Field(
        None,
        description="32:3,64:2 takes batches of 32 for 3 epochs, of 64 for 2, then --batch-size; "
        "left out: none",
    )
    accumulate: PositiveInt = Field(1, description="rounds a global batch is computed in")
    recompute: str = Field(
        "none",
        description="layers whose activations are computed again on the way back, to need less "
        "memory: none, all, or a regular expression",
    )
    learning_rate: PositiveFloat = Field(1e-3, description="its highest value")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how the rate goes with --batch-size over --lr-reference-batch"
    )
    lr_reference_batch: PositiveInt | None = Field(
        None, description="the batch that --learning-rate is meant for; left out: none is known"
    )
    lr_rule: Literal["constant", "cosine", "polynomial", "step", "one_cycle"] = Field(
        "constant", description="constant, or how the rate falls over all epochs"
    )
    lr_decay_epochs: list[PositiveFloat] | None = Field(
        None, description="30,60,80: where the step rule lowers the rate; left out: nowhere"
    )
    lr_decay_factor: float = Field(
        0.1, gt=0, lt=1, description="of the step rule: from one rate to the next"
    )
    lr_power: PositiveFloat = Field(2.0, description="of the polynomial rule; 1 is a straight line")
    warmup_epochs: NonNegativeFloat = Field(
        0.0, description="epochs of linear rise before the rule"
    )
    warmup_start: NonNegativeFloat = Field(0.0, description="the rate that the rise begins at")
    optimizer: Literal["adam", "lamb", "lars", "sgd"] = Field(
        "adam", description="which rule the weights follow"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="of the optimizers sgd and lars")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="of all weights but biases and those of normalisation"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of each label that goes to all classes alike"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="0.999 evaluates and keeps averages of the weights; left out: the weights",
    )
    early_stopping: Annotated[str, Field(pattern=r"^[^:]+:[1-9]\d*$")] | None = Field(
        None,
        description="val_loss:5 stops after 5 epochs without a better one; left out: never",
    )
    steps_per_call: Literal["auto"] | PositiveInt = Field(
        "auto", description="optimizer steps per call into the graph"
    )
    jit_compile: bool = Field(False, description="compile the step with XLA")
    run_eagerly: bool = Field(False, description="run without graphs, for debugging; slow")


class Precision(BaseModel):
    """Number formats."""

    precision: Literal["float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16"] = Field(
        "float32", description="of computation and, unless mixed, of the weights"
    )
    loss_scale: Literal["auto", "none", "dynamic"] | PositiveFloat = Field(
        "auto", description="factor on the loss; auto: dynamic with float16, none otherwise"
    )
    loss_scale_initial: PositiveFloat = Field(32768.0, description="first dynamic loss scale")
    loss_scale_growth_interval: PositiveInt = Field(
        2000, description="finite steps before a dynamic scale grows"
    )
    loss_scale_growth_factor: float = Field(2.0, gt=1, description="by which it grows")
    loss_scale_backoff_factor: float = Field(
        0.5, gt=0, lt=1, description="by which it falls after a step that was not finite"
    )


def scales_dynamically(precision: object, loss_scale: object) -> bool:
    """Whether the loss scale moves by itself: as asked, or because the format underflows."""
    in_float16 = precision in ("float16", "mixed_float16")
    return loss_scale == "dynamic" or (loss_scale == "auto" and in_float16)
