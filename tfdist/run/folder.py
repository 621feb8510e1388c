"""The folder with all files of one training run.

config.yaml     the resolved configuration, with comments on what ran; `--config` reads it
versions.json   provenance: software, command line, seed, devices, sources
metrics.jsonl   one line per epoch
curves.png      the same as a picture
tensorboard/    the same as TensorBoard events
metrics.csv     the same as CSV, with `--logger csv`
checkpoints/    the newest states of the run, to resume from
model.keras     the trained model, for plain Keras, and the forms of `--export` beside it
logs/           the output of the workers other than rank 0
.lock           exists while a process trains in the folder
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from tfdist.checkpoint.manifest import versions
from tfdist.config import Outcome, Saving, Spread, StrategyOptions, TrainConfig
from tfdist.console.files import replacing
from tfdist.errors import ConfigurationError

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

#: Names within a run folder.
CHECKPOINTS, CONFIG, VERSIONS = "checkpoints", "config.yaml", "versions.json"

_METRICS = ("metrics.jsonl", "metrics.csv")
_OTHER_BYTES = 2**20  # of metrics, curves and TensorBoard's events
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GIT_SECONDS = 10.0

#: Fields that may differ when a run is resumed: they do not change what is computed.
_MAY_DIFFER = (
    {*Spread.model_fields, *StrategyOptions.model_fields, *Saving.model_fields}
    | {"run_dir", "read_ahead", "cache_dir", "verbose", "accumulate", "remat", "steps_per_call"}
    | {"run_eagerly", "jit_compile", "max_time", *Outcome.model_fields}
) - {"sync_batch_norm", "replica_random"}


class RunFolder:
    """A folder for one run.

    Args:
        path: A folder that `create` returned, in this process or in another worker.
    """

    def __init__(self, path: str | Path) -> None:
        from tfdist.checkpoint.lock import FolderLock

        self.path = Path(path)
        self._lock = FolderLock(self.path)
        self._created: list[Path] = []  # what did not exist before, parents first

    @classmethod
    def create(
        cls,
        config: TrainConfig,
        model: Any,
        what_runs: Mapping[str, str],
        comes_from: Mapping[str, Any] = MappingProxyType({}),
    ) -> RunFolder:
        """Creates and locks a folder; never one with another run's results.

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
        existing = _to_resume(config) if config.resume == "auto" else None
        if existing is not None:
            folder = cls(existing)
            folder._lock.acquire()
            return folder
        try:
            folder = cls._named(Path(config.run_dir)) if config.run_dir else cls._new(config)
            folder._lock.acquire()
            folder._prepare(config.resume)
            comments = "".join(f"# {name}: {what}\n" for name, what in what_runs.items())
            folder._write(CONFIG, comments + config.to_yaml())
            versions = {**_software(), **comes_from}
            folder._write(VERSIONS, json.dumps(versions, indent=2) + "\n")
            probe_space(folder.path, model)
        except OSError as error:
            raise ConfigurationError(
                f"The run folder and a model in it cannot be written: {error}. Free some space, or "
                "use another folder with --run-dir."
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
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.keras"

    def log(self, rank: int) -> Path:
        """Returns the file for the output of a worker other than rank 0."""
        return self.path / "logs" / f"rank-{rank}.log"

    def discard(self) -> None:
        """Removes what `create` has created, for a run that failed before its first step."""
        self.close()
        if not self._created or any(self.path.glob("logs/*")):
            return
        for path in reversed(self._created):
            if path == self.path:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir():
                try:
                    path.rmdir()
                except OSError:  # another run has used it meanwhile
                    break

    def close(self) -> None:
        """Releases the lock."""
        self._lock.release()

    @classmethod
    def _named(cls, path: Path) -> RunFolder:
        folder = cls(path)
        folder._created = [p for p in (*reversed(path.parents), path) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def _new(cls, config: TrainConfig) -> RunFolder:
        """Creates a folder under `runs/`; two runs that start in the same second get two."""
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

    def _prepare(self, resume: str) -> None:
        """Checks that no results would be lost, and removes those of a run that starts again.

        Raises:
            ConfigurationError: The folder has another run's results.
        """
        from tfdist.checkpoint.store import Store

        if not self.model.exists():
            if resume == "auto":  # killed before its first checkpoint: all its epochs are repeated
                for name in _METRICS:
                    (self.path / name).unlink(missing_ok=True)
            elif resume == "never" and Store(self.checkpoints).all_damaged():
                for name in _METRICS:
                    if (self.path / name).exists():
                        (self.path / name).rename(self.path / f"damaged-{name}")
        if self.metrics.exists() or self.model.exists():
            raise ConfigurationError(
                f"{self.path} already has a run, which would be overwritten: use another folder "
                "with --run-dir, resume the run with --resume auto, or remove it."
            )

    def _write(self, name: str, text: str) -> None:
        with replacing(self.path / name) as path:
            path.write_text(text)


def probe_space(path: Path, model: Any) -> None:
    """Checks that a folder's disk has the space that a run needs, by allocating it briefly.

    Args:
        path: The folder.
        model: The compiled `keras.Model` that will be saved there with its optimizer.

    Raises:
        OSError: There is not enough space, or no permission.
    """
    import tensorflow as tf

    variables = [*model.variables, *model.optimizer.variables]
    sizes = (math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    with replacing(path / "probe") as file, file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, sum(sizes) + _OTHER_BYTES)
    (path / "probe").unlink()


def full_disk_message(error: Exception) -> str:
    """Returns an error's message about a full disk or an exceeded quota; empty for other errors."""
    return next((os.strerror(number) for number in _FULL if os.strerror(number) in str(error)), "")


def save_model(model: Any, path: Path) -> tuple[Path, Exception | None]:
    """Saves a Keras model, in another folder if the disk is full.

    Args:
        model: A `keras.Model`.
        path: The file to write.

    Returns:
        The file that was written, and the error if it is not `path`.

    Raises:
        Exception: The error of saving to `path`, if the model cannot be saved anywhere.
    """
    try:
        with replacing(path) as file:
            model.save(file)
    except Exception as error:  # The system, h5py and zipfile each raise their own.
        for place in (Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path("/dev/shm")):
            try:
                elsewhere = Path(tempfile.mkdtemp(prefix="tfdist-", dir=place)) / path.name
                with replacing(elsewhere) as file:
                    model.save(file)
            except Exception:
                continue
            return elsewhere, error
        raise
    return path, None


def provenance(config: TrainConfig, strategy: Strategy, recipe: Any) -> dict[str, Any]:
    """Returns what is needed to reproduce a run, besides the software.

    Args:
        config: Configuration of the run.
        strategy: Strategy of the run.
        recipe: The module of the recipe.
    """
    sources = {"tfdist": sys.modules["tfdist"], "recipe": recipe}
    return {
        "seed": config.seed,
        "deterministic": config.deterministic,
        "strategy": strategy.name,
        "devices": list(strategy.devices),
        "workers": strategy.num_workers,
        "replicas": strategy.num_replicas,
        "git": {name: git_state(_folder_of(module)) for name, module in sources.items()},
    }


def git_state(folder: Path | None) -> dict[str, Any] | None:
    """Returns commit and branch of a folder's sources, and whether files have changed since.

    Returns None if the folder is in no repository, or git is not installed.
    """
    if folder is None:
        return None
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "branch": branch, "changed": bool(changed)}


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=_GIT_SECONDS,
        check=True,
    )
    return done.stdout.strip()


def _folder_of(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).parent if file else None


def _software() -> dict[str, Any]:
    """Returns versions, the machine, and how and when the command was called."""
    return {
        **versions(),
        "machine": platform.platform(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _to_resume(config: TrainConfig) -> Path | None:
    """Returns the folder of the run that `--resume auto` resumes.

    Args:
        config: With `run_dir`, that folder, if it has checkpoints; otherwise the newest folder
            under `runs/` of an unfinished run of the same configuration.

    Raises:
        ConfigurationError: The folder is of a run of another configuration.
    """
    from tfdist.checkpoint.store import Store

    if config.run_dir is not None:
        folder = Path(config.run_dir)
        if not Store(folder / CHECKPOINTS).places():
            return None
        if other := _difference(config, folder):
            raise ConfigurationError(
                f"{folder} was started with {other}: use the same options, or another folder with "
                "--run-dir."
            )
        return folder
    found = Path("runs").glob(f"*/{CHECKPOINTS}")
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        if not _difference(config, path.parent) and not _has_ended(path):
            return path.parent
    return None


def _has_ended(checkpoints: Path) -> bool:
    """Returns whether the newest intact checkpoint of a run is that of its end.

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


def _difference(config: TrainConfig, folder: Path) -> str:
    """Returns the first field that would change what is computed; empty if there is none."""
    try:
        saved: Any = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, yaml.YAMLError, RecursionError):
        return f"a {CONFIG} that cannot be read"
    if not isinstance(saved, Mapping):
        return f"a {CONFIG} that cannot be read"
    for name, value in config.model_dump(mode="json").items():
        if name not in _MAY_DIFFER and saved.get(name) != value:
            return f"{name}={saved.get(name)!r}, not {value!r}"
    return ""
