"""The folder that holds everything one training run leaves behind.

config.yaml     the resolved configuration, below what ran of it; `--config` reads it
versions.json   where it comes from: software, command line, seed, devices, sources
metrics.jsonl   one line per epoch
curves.png      the same as a picture
tensorboard/    the same as TensorBoard events
metrics.csv     the same, where --logger asks for it
checkpoints/    the newest states of the run, to go on from
model.keras     the trained model, for plain Keras; what --export asks for beside it
logs/           what the workers other than rank 0 would have printed
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfdist.config import TrainConfig
from tfdist.console.files import replacing
from tfdist.errors import ConfigurationError
from tfdist.run import provenance, resuming, room


class RunFolder:
    """A folder for one run.

    Args:
        path: Of a folder that `create` made, in this process or in another worker.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        config: TrainConfig,
        model: Any,
        what_runs: Mapping[str, str],
        comes_from: Mapping[str, Any] = MappingProxyType({}),
    ) -> RunFolder:
        """Makes a folder that never overwrites another run's and has room for its own.

        Args:
            config: Names the folder (`run_dir`), or the recipe and strategy that a new folder
                under `runs/` is called after; or goes on with one that is there (`resume`).
            model: The compiled `keras.Model` that will be saved there.
            what_runs: Names and what is known of each: comments above the configuration.
            comes_from: What `versions.json` says beside the software.

        Raises:
            ConfigurationError: The folder holds another run, cannot be made, or has no room.
        """
        begun = resuming.begun(config) if config.resume == "auto" else None
        if begun is not None:
            return cls(begun)
        try:
            folder = cls(
                _named(Path(config.run_dir), config.resume) if config.run_dir else _new(config)
            )
            comments = "".join(f"# {name}: {what}\n" for name, what in what_runs.items())
            folder._write("config.yaml", comments + config.to_yaml())
            versions = {**provenance.software(), **comes_from}
            folder._write("versions.json", json.dumps(versions, indent=2) + "\n")
            room.probe(folder.path, model)
        except OSError as error:
            raise ConfigurationError(
                f"The run folder and a model in it cannot be written: {error}. Make room, or name "
                "another folder with --run-dir."
            ) from error
        return folder

    @property
    def metrics(self) -> Path:
        """The JSON lines with the metrics of each epoch."""
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        """The picture of the metrics."""
        return self.path / "curves.png"

    @property
    def tensorboard(self) -> Path:
        """The folder with TensorBoard's events."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The folder of the states to go on from."""
        return self.path / resuming.CHECKPOINTS

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.keras"

    def log(self, rank: int) -> Path:
        """What a worker other than rank 0 prints."""
        return self.path / "logs" / f"rank-{rank}.log"

    def _write(self, name: str, text: str) -> None:
        with replacing(self.path / name) as path:
            path.write_text(text)


def _named(path: Path, resume: str) -> Path:
    """The folder that the user named: new, empty, or at least without a run in it."""
    if resume == "auto":
        resuming.clear(path)
    results = ("metrics.jsonl", "model.keras")  # a run that failed at its start left none to lose
    if any((path / name).exists() for name in results):
        raise ConfigurationError(
            f"{path} already holds a run, which would be lost: name another folder with --run-dir, "
            "or remove this one."
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def _new(config: TrainConfig) -> Path:
    """A folder under `runs/` that was not there, also when two runs start in the same second."""
    name = f"{Path(config.recipe).stem}-{config.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path
