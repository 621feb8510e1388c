"""Reads run folders: configuration, metrics, and whether a run has ended."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import pipelines
from pipelines.storage import AnyPath
from tfdist.checkpoint.lock import NAME as LOCK
from tfdist.checkpoint.lock import lock_of
from tfdist.errors import ConfigurationError
from tfdist.run.records import read_rows

#: Columns of `metrics.jsonl` that are not metrics.
NOT_METRICS = ("epoch", "step", "seconds", "examples_per_second", "data_wait_share")


class Run(NamedTuple):
    """The content of a run folder.

    Attributes:
        path: The folder, local or in an object store.
        config: Fields of the configuration.
        epochs: One mapping per epoch, as in `metrics.jsonl`.
        state: `"finished"`, `"running"` or `"stopped"`.
        num_bytes: Size of all files.
    """

    path: AnyPath
    config: Mapping[str, Any]
    epochs: list[Mapping[str, float | None]]
    state: str
    num_bytes: int

    @property
    def started(self) -> str:
        """Time at which the folder was created, from `versions.json`."""
        try:
            return str(json.loads((self.path / "versions.json").read_bytes())["started"])[:16]
        except (OSError, ValueError, KeyError, pipelines.DataError):
            if not isinstance(self.path, Path):
                return ""
            return time.strftime("%Y-%m-%dT%H:%M", time.localtime(self.path.stat().st_mtime))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last epoch."""
        last = self.epochs[-1] if self.epochs else {}
        return {k: v for k, v in last.items() if k not in NOT_METRICS and v is not None}

    def curve(self, metric: str) -> list[float]:
        """Returns a metric over the epochs; NaN where it has no value."""
        values = (epoch.get(metric) for epoch in self.epochs)
        return [float("nan") if value is None else value for value in values]


def read(path: AnyPath) -> Run:
    """Reads a run folder.

    Raises:
        ConfigurationError: The folder is not a run folder, or cannot be read.
    """
    try:
        config = yaml.safe_load((path / "config.yaml").read_bytes())
        sizes = _sizes(path)
        epochs = read_epochs(path) if "metrics.jsonl" in sizes else []
        state = "running" if lock_of(str(path)).is_held() else "stopped"
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path} is not a run folder: there is no such folder, or it has no config.yaml"
        ) from None
    except (OSError, yaml.YAMLError, pipelines.DataError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is not a run folder: {reason}") from None
    if state == "stopped" and "model.keras" in sizes:
        state = "finished"
    config = config if isinstance(config, Mapping) else {}
    return Run(path, config, epochs, state, sum(sizes.values()))


def read_epochs(path: AnyPath) -> list[Mapping[str, float | None]]:
    """Returns the rows of epochs in a run's `metrics.jsonl`; empty if the file does not exist."""
    return [row for row in read_rows(path) if "epoch" in row]


def below(folder: AnyPath) -> list[Run]:
    """Returns the runs in a folder, the newest first, and warns of those that cannot be read.

    Raises:
        ConfigurationError: The folder contains no runs, or the object store cannot be read.
    """
    try:
        names = _names(folder)
    except pipelines.DataError as error:
        raise ConfigurationError(f"{folder} cannot be read: {error}") from None
    runs = []
    for name in names:
        try:
            runs.append(read(folder / name))
        except ConfigurationError as error:
            print(f"warning: {error}", file=sys.stderr)
    if not runs:
        raise ConfigurationError(
            f"{folder} contains no runs. Choose another folder with --folder, or start a run "
            "with python -m tfdist.train."
        )
    return sorted(runs, key=lambda run: run.started, reverse=True)


def remove(run: Run) -> None:
    """Deletes a run folder.

    Raises:
        ConfigurationError: A run is using it, or it cannot be deleted.
    """
    lock = lock_of(str(run.path))
    lock.acquire()
    try:
        if isinstance(run.path, Path):
            shutil.rmtree(run.path)
        else:
            names = run.path.sizes().keys() - {LOCK}
            # The configuration last, so that a partly removed run can still be listed and removed.
            run.path.delete_below(sorted(names, key=lambda name: name == "config.yaml"))
    except (OSError, pipelines.DataError) as error:
        raise ConfigurationError(f"{run.path} cannot be deleted: {error}") from None
    finally:
        lock.release()


def _names(folder: AnyPath) -> list[str]:
    if isinstance(folder, Path):
        return [path.parent.name for path in folder.glob("*/config.yaml")]
    parts = (name.split("/") for name in folder.sizes())
    return [part[0] for part in parts if len(part) == 2 and part[1] == "config.yaml"]


def _sizes(folder: AnyPath) -> dict[str, int]:
    """Returns the sizes of all files of a folder and its subfolders, by their relative names."""
    if not isinstance(folder, Path):
        return folder.sizes()
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
