"""Reads run folders: configuration, metrics, and whether a run has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tfdist.errors import ConfigurationError

#: Columns of `metrics.jsonl` that are no metrics.
NOT_METRICS = ("epoch", "step", "seconds", "examples_per_second", "data_wait_share")


class Run(NamedTuple):
    """What a run folder says.

    Attributes:
        path: The folder.
        config: Fields of the configuration.
        epochs: One mapping per epoch, as in `metrics.jsonl`.
        state: `"finished"`, `"running"` or `"stopped"`.
        num_bytes: Size of all files.
    """

    path: Path
    config: Mapping[str, Any]
    epochs: list[Mapping[str, float | None]]
    state: str
    num_bytes: int

    @property
    def started(self) -> str:
        """Time at which the folder was created, from `versions.json`."""
        try:
            return str(json.loads((self.path / "versions.json").read_text())["started"])[:16]
        except (OSError, ValueError, KeyError):
            return time.strftime("%Y-%m-%dT%H:%M", time.localtime(self.path.stat().st_mtime))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last epoch."""
        last = self.epochs[-1] if self.epochs else {}
        return {k: v for k, v in last.items() if k not in NOT_METRICS and v is not None}

    def curve(self, metric: str) -> list[float]:
        """Returns a metric over the epochs; NaN where it has no value."""
        values = (epoch.get(metric) for epoch in self.epochs)
        return [float("nan") if value is None else value for value in values]


def read(path: Path) -> Run:
    """Reads a run folder.

    Raises:
        ConfigurationError: The folder is not that of a run.
    """
    try:
        config = yaml.safe_load((path / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} is not a run folder: {error}") from None
    files = [file for file in path.rglob("*") if file.is_file()]
    state = "running" if is_locked(path) else "stopped"
    if state == "stopped" and (path / "model.keras").exists():
        state = "finished"
    config = config if isinstance(config, Mapping) else {}
    return Run(path, config, read_epochs(path), state, sum(file.stat().st_size for file in files))


def read_epochs(path: Path) -> list[Mapping[str, float | None]]:
    """Returns the complete lines of a run folder's `metrics.jsonl`; none if there is no file."""
    epochs: list[Mapping[str, float | None]] = []
    if (path / "metrics.jsonl").exists():
        for line in (path / "metrics.jsonl").read_text().splitlines():
            try:
                epochs.append(json.loads(line))
            except ValueError:
                break  # the run writes this line, or was killed while it did
    return epochs


def below(folder: Path) -> list[Run]:
    """Returns the runs in a folder, the newest first.

    Raises:
        ConfigurationError: There are none.
    """
    found = [read(path.parent) for path in folder.glob("*/config.yaml")]
    if not found:
        raise ConfigurationError(
            f"{folder}: there are no runs here. Name another folder with --folder, or start a run "
            "with python -m tfdist.train."
        )
    return sorted(found, key=lambda run: run.started, reverse=True)


def is_locked(path: Path) -> bool:
    """Returns whether a process that is alive holds the lock of a folder."""
    from tfdist.checkpoint.lock import FolderLock

    lock = FolderLock(path)
    try:
        lock.acquire()
    except ConfigurationError:
        return True
    lock.release()
    return False
