"""What is trained, where its files go, and over which devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from tfdist.models import MODELS
from tfdist.strategies import STRATEGIES

if TYPE_CHECKING:
    ModelName = str
    StrategyName = str
else:
    ModelName = Literal[tuple(MODELS)]
    StrategyName = Literal[tuple(STRATEGIES)]


def default_data_dir() -> str:
    """The cache folder for data sets: `$XDG_CACHE_HOME/tfdist`, or `~/.cache/tfdist`."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfdist")


class Run(BaseModel):
    """What to train and where to put it."""

    recipe: str = Field(
        "digits", description="what to train: a module of recipes/, ./mine.py, or a dotted name"
    )
    model: ModelName | None = Field(
        None, description="network, where the recipe lets one be chosen; left out: the recipe's"
    )
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="a hyperparameter of the recipe's own or of --model; once for each",
    )
    data: str | None = Field(
        None, description="synthetic, small, a folder or tfds:NAME; left out: the recipe's"
    )
    run_dir: str | None = Field(
        None, description="folder for this run's files; left out: a new one under runs/"
    )
    data_dir: str = Field(
        default_factory=default_data_dir, description="cache folder for the data sets' shards"
    )
    seed: NonNegativeInt = Field(0, description="of weights, shuffling, augmentation and dropout")
    deterministic: bool = Field(
        False, description="two runs on one machine are equal to the bit; slower"
    )
    verbose: Literal["auto"] | Annotated[int, Field(ge=0, le=2)] = Field(
        "auto", description="0 silent, 1 progress line, 2 one line per epoch, auto: 1 on a terminal"
    )
    smoke: bool = Field(False, description="run three steps of everything, to see that it works")


class Spread(BaseModel):
    """How the work is spread over devices."""

    strategy: StrategyName = Field(
        "one_device", description="who computes, and how gradients cross"
    )
    devices: Annotated[int, Field(ge=1)] | list[str] | None = Field(
        None, description="how many, or names (GPU:0,GPU:1); left out: the strategy's choice"
    )
    memory: Literal["grow"] | PositiveInt = Field(
        "grow",
        description="of a GPU: grow takes what is needed, N at most so many MB; without GPUs N is "
        "for all devices of a process",
    )
    workers: list[str] | None = Field(
        None, description="host:port of each worker, by rank, where no launcher tells"
    )
    rank: NonNegativeInt | None = Field(None, description="this worker's number among --workers")
    watchdog_seconds: NonNegativeFloat = Field(
        300.0, description="silence after which a worker is given up; 0: wait for ever"
    )
    sync_batch_norm: bool = Field(False, description="BatchNorm statistics over all replicas")
