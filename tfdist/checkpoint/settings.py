"""The options of checkpoints: where, how often, how many. Imports no TensorFlow."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tfdist.console import units
from tfdist.errors import ConfigurationError

#: What happens if a checkpoint cannot be written.
OnError = Literal["go_on", "stop"]


@dataclass(frozen=True)
class Checkpoints:
    """Where a trainer saves checkpoints, and whether it resumes from one.

    Example:
        >>> checkpoints = tfdist.Checkpoints("runs/a/checkpoints", every="epoch", keep=2)
        >>> trainer = tfdist.Trainer(build_model, devices=2, checkpoints=checkpoints)
        >>> history = trainer.fit(x, y, batch_size=64, epochs=3, verbose=0)
        >>> [folder.name for folder in sorted(Path("runs/a/checkpoints").glob("epoch-*"))]
        ['epoch-0002-step-000000058', 'epoch-0003-step-000000087']

    Attributes:
        folder: The folder for the checkpoints of one run: local, the URL of a folder in an object
            store (`s3://...`), or another path that `tf.io.gfile` supports.
        every: `"epoch"`; a number of training steps; or a time, such as `"10m"` or `"1h30m"`. A
            run always saves a checkpoint when it ends or is stopped.
        keep: How many of the newest checkpoints to keep.
        keep_best: A key of the logs, such as `val_loss`: also keeps the checkpoint of the epoch
            with its best value. Use `"max:NAME"` or `"min:NAME"` for a key whose direction Keras
            cannot infer.
        resume: `"auto"` resumes from the newest intact checkpoint of the folder, if there is one;
            a path resumes from that checkpoint, or from the newest of that folder; `"never"` starts
            from the beginning, and the folder must have no intact checkpoints.
        on_error: What to do if a checkpoint cannot be written: `"go_on"` prints a warning and
            continues training, `"stop"` ends the run.
        frozen: Whether to save frozen weights too. If not, a run that resumes has to start with the
            same ones, such as those of a preset, which is checked.
        configuration: Stored in each checkpoint, for information.
        before_upload: Called in a background thread before a checkpoint is uploaded to an object
            store; for files that a resumed run needs together with it.

    Raises:
        ConfigurationError: An option has an invalid value.
    """

    folder: str | Path
    every: str | int = "epoch"
    keep: int = 3
    keep_best: str | None = None
    resume: str | Path = "auto"
    on_error: OnError = "go_on"
    frozen: bool = True
    configuration: Mapping[str, Any] = field(default_factory=dict)
    before_upload: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None and not self.at_epochs:
            raise ConfigurationError(
                f"every={self.every!r}: expected 'epoch', a number of steps from 1, or a time "
                "above 0, like '10m'."
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
        """Training steps between two checkpoints; None if `every` is not a number of steps."""
        text = str(self.every)
        return int(text) if text.isdecimal() and int(text) else None

    @property
    def seconds(self) -> float | None:
        """Seconds between two checkpoints; None if `every` is not a time."""
        return units.seconds(str(self.every)) or None

    def of_fit(self, number: int) -> Checkpoints:
        """Returns the options of a trainer's n-th `fit` (from 1), each with a folder of its own."""
        if number == 1:
            return self
        is_path = self.resume not in ("auto", "never")
        return replace(
            self,
            folder=posixpath.join(os.fspath(self.folder), f"fit-{number}"),
            resume="auto" if is_path else self.resume,
        )
