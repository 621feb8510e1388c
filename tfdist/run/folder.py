"""The folder with all files of one training run.

config.yaml     the resolved configuration, with comments on what ran; `--config` reads it
versions.json   provenance: software, command line, seed, devices, sources
metrics.jsonl   one line per logged step and per epoch
curves.png      the epochs as a picture
tensorboard/    the same as TensorBoard events
metrics.csv     the same as CSV, with `--logger csv`
ledger.json     where the time went, for each process of the run
logger-X.json   the run of a logger, and the last row that it has got
checkpoints/    the newest states of the run, to resume from
model.keras     the trained model, for plain Keras, and the forms of `--export` beside it
logs/           the output of the workers other than rank 0
.lock           exists while a process trains in the folder

A folder in an object store has the same files. They are written to a local folder and uploaded.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

import pipelines
from pipelines import storage
from tfdist.config import Outcome, Saving, Spread, StrategyOptions, TrainConfig
from tfdist.console.files import remove_interrupted, replacing
from tfdist.errors import ConfigurationError
from tfdist.run.provenance import software
from tfdist.run.saved_model import full_disk_message, probe_space

#: Names within a run folder.
CHECKPOINTS, CONFIG, VERSIONS = "checkpoints", "config.yaml", "versions.json"
#: The steps that a run leaves out, after the loss left its band: a list of first and last numbers.
SKIPPED = "skipped_steps.json"

_LOGGERS = tuple(f"logger-{name}.json" for name in ("tensorboard", "csv", "mlflow", "wandb"))
_METRICS = ("metrics.jsonl", "metrics.csv", "ledger.json", SKIPPED, *_LOGGERS)

#: Fields that may differ when a run is resumed, because they do not change the results.
_MAY_DIFFER = (
    {*Spread.model_fields, *StrategyOptions.model_fields, *Saving.model_fields}
    | {"run_dir", "read_ahead", "cache_dir", "compile_cache", "verbose", "accumulate", "remat"}
    | {"offload_activations"}
    | {"steps_per_call", "run_eagerly", "jit_compile", "max_time", *Outcome.model_fields}
) - {"sync_batch_norm", "replica_random"}


class RunFolder:
    """A folder for one run.

    Args:
        location: The path or URL of a folder.
        rank: Rank of this worker. Workers other than the chief write nothing but their logs.
    """

    def __init__(self, location: str | Path, rank: int = 0) -> None:
        from tfdist.checkpoint.lock import lock_of
        from tfdist.run.mirror import Mirror

        try:  # without a slash at its end
            self.location = str(storage.at(str(location)))
        except pipelines.DataError:
            raise ConfigurationError(
                f"{location}: expected a local folder or the URL of one in an object store, such "
                "as s3://bucket/run."
            ) from None
        self._lock = lock_of(self.location)
        self._mirror: Mirror | None = None
        self.path = Path(self.location)
        if storage.is_object_store(self.location):
            self._mirror = Mirror(self.location, rank, self._lock.check)
            self.path = self._mirror.local
        self._created: list[Path] = []  # what did not exist before, parents first

    @classmethod
    def of_worker(cls, location: str, rank: int) -> RunFolder:
        """Returns the folder that the chief created, on another worker.

        Raises:
            ConfigurationError: The object store cannot be read.
        """
        folder = cls(location, rank)
        if folder._mirror is not None:
            folder._mirror.open([folder.log(rank).relative_to(folder.path).as_posix()])
        return folder

    @classmethod
    def create(
        cls,
        config: TrainConfig,
        model: Any,
        what_runs: Mapping[str, str],
        comes_from: Mapping[str, Any] = MappingProxyType({}),
    ) -> RunFolder:
        """Creates and locks a folder. Refuses a folder with the results of another run.

        Args:
            config: `run_dir` names the folder; without it, a new folder under `runs/` is named
                after the recipe and the strategy. With `resume`, the folder may exist already.
            model: The compiled `keras.Model` that will be saved there.
            what_runs: Facts by name, for the comments in `config.yaml`.
            comes_from: Entries of `versions.json` besides the software.

        Raises:
            ConfigurationError: The folder has another run's results, is in use by another run,
                cannot be created, or its disk is too full for the model.
        """
        comments = "".join(f"# {name}: {what}\n" for name, what in what_runs.items())

        def fill(folder: RunFolder) -> None:
            """Writes the files that describe a new run."""
            folder._prepare(config)
            folder._write(CONFIG, comments + config.to_yaml())
            folder._write(VERSIONS, json.dumps({**software(), **comes_from}, indent=2) + "\n")
            probe_space(folder.path, model)

        if config.run_dir and storage.is_object_store(config.run_dir):
            return cls._in_bucket(config, fill)
        existing = _to_resume(config) if config.resume == "auto" else None
        if existing is not None:
            folder = cls(existing)
            folder._acquire()
            with _explained(config):
                tempfile.TemporaryFile(dir=folder.path).close()  # a read-only disk fails here
            return folder
        with _explained(config):
            folder = cls._named(config.run_dir) if config.run_dir else cls._new(config)
            folder._acquire()
            fill(folder)
        return folder

    @property
    def name(self) -> str:
        """The last part of the path or URL."""
        return self.location.rpartition("/")[2]

    @property
    def metrics(self) -> Path:
        """The JSON lines with the metrics of logged steps and of each epoch."""
        return self.path / "metrics.jsonl"

    def skipped_steps(self) -> list[tuple[int, int]]:
        """Returns the first and last numbers of the steps that the run leaves out."""
        path = self.path / SKIPPED
        return [(a, b) for a, b in json.loads(path.read_text())] if path.exists() else []

    def skip(self, steps: Sequence[tuple[int, int]]) -> None:
        """Writes the file that `skipped_steps` reads."""
        self._write(SKIPPED, json.dumps(steps) + "\n")

    @property
    def curves(self) -> Path:
        """The picture of the metrics."""
        return self.path / "curves.png"

    @property
    def tensorboard(self) -> Path:
        """The folder with TensorBoard's events."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> str:
        """The path or URL of the folder of the checkpoints."""
        return f"{self.location}/{CHECKPOINTS}"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.keras"

    def log(self, rank: int) -> Path:
        """Returns the file for the output of a worker other than rank 0."""
        return self.path / "logs" / f"rank-{rank}.log"

    def discard(self) -> None:
        """Removes the files that `create` created, after a failure before the first step."""
        if self._mirror is not None:
            self._mirror.discard()
        self.close()
        if not self._created or any(self.path.glob("logs/*")):
            return
        for path in reversed(self._created):
            if path == self.path:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir():
                try:
                    path.rmdir()
                except OSError:  # another run is using it
                    break

    def start_uploads(self) -> None:
        """Uploads files in the background from now on; does nothing for a local folder."""
        if self._mirror is not None:
            self._mirror.start()

    def upload(self) -> None:
        """Uploads the files that have changed; does nothing for a local folder.

        Raises:
            OSError: A file cannot be uploaded.
        """
        if self._mirror is not None:
            self._mirror.upload()

    def finish(self) -> None:
        """Uploads the remaining files at the end of a run, on every worker.

        Raises:
            ConfigurationError: A file cannot be uploaded.
        """
        if self._mirror is not None:
            self._mirror.finish()

    def close(self) -> None:
        """Uploads the files of a run that failed, and releases the lock."""
        try:
            self.finish()
        except ConfigurationError as error:
            print(error, file=sys.stderr, flush=True)
        self._lock.release()

    @classmethod
    def _in_bucket(cls, config: TrainConfig, fill: Callable[[RunFolder], None]) -> RunFolder:
        """Creates or opens, and locks, a folder in an object store; `fill` writes new files."""
        folder = cls(str(config.run_dir))
        folder._acquire()
        try:
            with _explained(config):
                if folder._mirror is not None:
                    folder._mirror.open((CONFIG, VERSIONS, *_METRICS))
                if config.resume != "auto" or not _can_resume(config, folder):
                    fill(folder)
                folder.upload()
        except BaseException:
            folder.discard()
            raise
        return folder

    @classmethod
    def _named(cls, location: str) -> RunFolder:
        folder = cls(location)
        path = folder.path
        folder._created = [p for p in (*reversed(path.parents), path) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def _new(cls, config: TrainConfig) -> RunFolder:
        """Creates a folder in `runs/`. Runs that start in the same second get different folders."""
        name = f"{Path(config.recipe).stem}-{config.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
        Path("runs").mkdir(exist_ok=True)
        number = 1
        while True:
            folder = cls(Path("runs") / (name if number == 1 else f"{name}-{number}"))
            try:
                folder.path.mkdir()
            except FileExistsError:
                number += 1
            else:
                folder._created = [folder.path]
                return folder

    def _acquire(self) -> None:
        """Locks the folder, and removes what killed runs left in it.

        Raises:
            ConfigurationError: Another run uses the folder.
        """
        self._lock.acquire()
        remove_interrupted(self.path)

    def _prepare(self, config: TrainConfig) -> None:
        """Checks that no results would be overwritten, and removes those of a run that restarts.

        A smoke run has no results: another one may replace it.
        """
        from tfdist.checkpoint.store import store_at

        resume = config.resume
        if config.smoke and self._mirror is None and (_saved(self.path) or {}).get("smoke"):
            for name in (*_METRICS, self.model.name):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        has_model = self.model.exists()
        if self._mirror is not None:
            has_model = self._mirror.exists(self.model.name)
        if not has_model:
            if resume == "auto":  # killed before its first checkpoint, so it restarts
                is_same = not _difference(config, self.path)  # then ledger and loggers continue
                for name in _METRICS[:2] if is_same else _METRICS:
                    (self.path / name).unlink(missing_ok=True)
            elif resume == "never" and store_at(self.checkpoints).all_damaged():
                for name in _METRICS:
                    if (self.path / name).exists():
                        (self.path / name).rename(self.path / f"damaged-{name}")
        if self.metrics.exists() or has_model:
            raise ConfigurationError(
                f"{self.location} already contains a run, which would be overwritten. Use another "
                "folder with --run-dir, resume the run with --resume auto, or remove it."
            )

    def _write(self, name: str, text: str) -> None:
        with replacing(self.path / name) as path:
            path.write_text(text)


def _to_resume(config: TrainConfig) -> Path | None:
    """Returns the folder of the run that `--resume auto` resumes.

    Args:
        config: With `run_dir`, that folder, if it has checkpoints; otherwise the newest folder
            under `runs/` of an unfinished run of the same configuration.

    Raises:
        ConfigurationError: The folder is of a run of another configuration.
    """
    if config.run_dir is not None:
        folder = RunFolder(config.run_dir)
        return folder.path if _can_resume(config, folder) else None
    folders = Path("runs").glob(f"*/{CHECKPOINTS}")
    for path in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        if not _difference(config, path.parent) and not _has_ended(path):
            return path.parent
    return None


def _can_resume(config: TrainConfig, folder: RunFolder) -> bool:
    """Returns whether a folder has checkpoints of the same configuration."""
    from tfdist.checkpoint.store import store_at

    if not store_at(folder.checkpoints).places():
        return False
    if other := _difference(config, folder.path):
        raise ConfigurationError(
            f"{folder.location} was started with {other}. Use the same options, or another folder "
            "with --run-dir."
        )
    return True


@contextmanager
def _explained(config: TrainConfig) -> Iterator[None]:
    """Converts errors of writing the folder to a ConfigurationError with a fix."""
    try:
        yield
    except OSError as error:
        cure = "Free some space, or use" if full_disk_message(error) else "Use"
        raise ConfigurationError(
            f"Cannot write the run folder {config.run_dir or 'in runs/'}: {error}. {cure} another "
            "folder with --run-dir."
        ) from error


def _has_ended(checkpoints: Path) -> bool:
    """Returns whether the newest intact checkpoint of a run is from its end.

    A run whose checkpoints are all damaged has not: resuming it reports the damage.
    """
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.store import Store

    store = Store(checkpoints)
    places = store.places()
    for place in places:
        try:
            return bool(manifest.read(store.path(place))["ended"])
        except manifest.DamagedError:
            continue
    return not places


def _saved(folder: Path) -> Mapping[str, Any] | None:
    """Returns the configuration of the run in a folder; None if it cannot be read."""
    try:
        saved: Any = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    return saved if isinstance(saved, Mapping) else None


def _difference(config: TrainConfig, folder: Path) -> str:
    """Returns the first different field that changes the results; empty if there is none."""
    saved = _saved(folder)
    if saved is None:
        return f"a {CONFIG} that cannot be read"
    for name, value in config.model_dump(mode="json").items():
        if name not in _MAY_DIFFER and saved.get(name) != value:
            return f"{name}={saved.get(name)!r}, not {value!r}"
    return ""
