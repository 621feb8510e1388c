"""How much of a run is made, how it is saved, and what else comes of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveFloat, PositiveInt

from tfdist.console import durations

#: A time such as `2h`, `1h30m` or `90s`.
_TIME = r"^(\d+[dhms])+$"


def seconds_of(time: object) -> object:
    """The seconds of a time such as `2h`, `1h30m` or `90s`; numbers come back as they are.

    Raises:
        ValueError: A text of another form.
    """
    if not isinstance(time, str) or time.replace(".", "", 1).isdigit():
        return time
    if (seconds := durations.seconds(time.strip())) is None:
        raise ValueError(f"expected a time like 90s, 30m, 2h or 1h30m, got {time!r}.")
    return seconds


class Saving(BaseModel):
    """How a run is saved, and goes on."""

    checkpoint_every: (
        Literal["epoch", "never"] | PositiveInt | Annotated[str, Field(pattern=_TIME)]
    ) = Field("epoch", description="epoch, steps, or a time: 10m; a run that is stopped, too")
    keep: PositiveInt = Field(3, description="how many of the newest checkpoints stay")
    keep_best: str | None = Field(
        None, description="val_loss keeps the best epoch's checkpoint, too; left out: none"
    )
    resume: str = Field(
        "never",
        description="auto: the same command goes on where its run stands; or a checkpoint's path",
    )
    checkpoint_errors: Literal["go_on", "stop"] = Field(
        "go_on", description="what a checkpoint that cannot be written does to the run"
    )


class Extent(BaseModel):
    """How much of a run to make."""

    limit_steps: PositiveInt | None = Field(
        None, description="most steps of an epoch, and of a validation; left out: all"
    )
    overfit_batches: PositiveInt | None = Field(
        None, description="train and validate on the same N batches; left out: on all"
    )
    max_time: Annotated[PositiveFloat, BeforeValidator(seconds_of)] | None = Field(
        None, description="90s, 30m, 2h, 1h30m: time after which to stop and save; left out: none"
    )


class Outcome(BaseModel):
    """What else comes of a run."""

    evaluate: str | None = Field(
        None,
        description="a saved model, .keras, or the newest checkpoint of a folder: evaluate it in "
        "place of training; left out: train",
    )
    profile: bool = Field(False, description="trace some steps, and tell where their time goes")
    logger: list[Literal["tensorboard", "csv", "mlflow", "wandb"]] = Field(
        ["tensorboard"],
        description="who is told the metrics besides metrics.jsonl; or several: a,b",
    )
    export: list[Literal["saved_model", "onnx", "tflite"]] = Field(
        [], description="forms of the trained model besides model.keras; or several: a,b"
    )
