"""What a user says of checkpoints: where, how often, how many. Imports no TensorFlow."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tfdist.console import durations
from tfdist.errors import ConfigurationError

#: What becomes of a training whose checkpoint cannot be written.
OnError = Literal["go_on", "stop"]


@dataclass(frozen=True)
class Checkpoints:
    """Where a trainer keeps checkpoints, and whether it goes on from one.

    Attributes:
        folder: Of all checkpoints of one run; any path that `tf.io.gfile` knows.
        every: `"epoch"`; a number of training steps; or a time, `"10m"`, `"1h30m"`. A training that
            ends or is stopped is saved besides.
        keep: How many of the newest stay.
        keep_best: A key of the logs, say `val_loss`: the checkpoint of the epoch in which it was
            best stays too. `"max:NAME"` or `"min:NAME"` where Keras does not know which is better.
        resume: `"auto"`: go on from the newest sound checkpoint of the folder, if there is one;
            a path: from that checkpoint, or from the newest of that folder; `"never"`: the folder
            has to hold none.
        on_error: What a checkpoint that cannot be written does to the training.
        configuration: Kept beside each checkpoint, for people and programs to read.

    Raises:
        ConfigurationError: One of them is of another form.
    """

    folder: str | Path
    every: str | int = "epoch"
    keep: int = 3
    keep_best: str | None = None
    resume: str | Path = "auto"
    on_error: OnError = "go_on"
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None and not self.at_epochs:
            raise ConfigurationError(
                f"every={self.every!r}: expected 'epoch', a number of steps from 1, or a time "
                "like '10m'."
            )
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ConfigurationError(f"keep={self.keep!r}: expected a number from 1.")
        if self.on_error not in get_args(OnError):
            raise ConfigurationError(
                f"on_error={self.on_error!r}: expected one of {', '.join(get_args(OnError))}."
            )

    @property
    def at_epochs(self) -> bool:
        """Whether every epoch ends with a checkpoint."""
        return self.every == "epoch"

    @property
    def steps(self) -> int | None:
        """Training steps between two checkpoints, where that is what was asked for."""
        text = str(self.every)
        return int(text) if text.isdecimal() and int(text) else None

    @property
    def seconds(self) -> float | None:
        """Seconds between two checkpoints, where that is what was asked for."""
        return durations.seconds(str(self.every))

    def of_fit(self, number: int) -> Checkpoints:
        """Returns those of the n-th `fit` of a trainer, from 1: in folders of their own."""
        if number == 1:
            return self
        within = self.resume not in ("auto", "never")
        return replace(
            self,
            folder=posixpath.join(os.fspath(self.folder), f"fit-{number}"),
            resume="auto" if within else self.resume,
        )
