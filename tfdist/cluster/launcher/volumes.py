"""The volumes of Kubernetes pods: one for run folders, which all pods share, and one for data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from tfdist.cluster.launcher import train_flags
from tfdist.cluster.launcher.options import Options
from tfdist.errors import ConfigurationError

_RUNS, _DATA = PurePosixPath("/runs"), PurePosixPath("/data")
#: Values of `--data` that are neither folders nor URLs.
_BUILT_IN = ("small", "synthetic")


@dataclass(frozen=True)
class Volume:
    """A volume of the pods.

    Attributes:
        name: Name in the manifest.
        claim: Name of the PersistentVolumeClaim, which the user creates.
        path: Mount path in the containers.
        comment: A comment for the user who creates the claim.
    """

    name: str
    claim: str
    path: str
    comment: str

    def source(self) -> dict[str, Any]:
        """Returns the volume of a pod."""
        return {"name": self.name, "persistentVolumeClaim": {"claimName": self.claim}}

    def mount(self) -> dict[str, Any]:
        """Returns the mount of a container."""
        return {"name": self.name, "mountPath": self.path}


def volumes(options: Options) -> list[Volume]:
    """Returns the volumes for the folders of the command. Object stores need no volume.

    Raises:
        ConfigurationError: A folder of the training command is not an absolute path.
    """
    runs: PurePosixPath | None = _RUNS
    data: PurePosixPath | None = _DATA
    if options.is_training_command:
        runs, data = _folder(options.command, "run_dir", _RUNS), _data_folder(options.command)
    mounts = []
    if runs:
        comment = "your claim, with ReadWriteMany: all pods write run folders to it"
        mounts.append(Volume("runs", f"{options.name}-runs", str(runs), comment))
    if data and data != runs:
        comment = "your claim with the data; all pods must be able to mount it"
        mounts.append(Volume("data", f"{options.name}-data", str(data), comment))
    return mounts


def portable_command(options: Options) -> tuple[str, ...]:
    """Returns the command for pods. A training command uses folders on the volumes.

    Raises:
        ConfigurationError: A folder of the training command is not an absolute path.
    """
    command = options.portable_command
    if not options.is_training_command:
        return command
    data = _data_folder(command)
    if not train_flags.setting(command, "run_dir"):
        command += ("--run-dir", str(_RUNS / options.name))
    if data and not train_flags.setting(command, "data_dir"):
        command += ("--data-dir", str(data / "packed"))
    return command


def _data_folder(command: tuple[str, ...]) -> PurePosixPath | None:
    """Returns the mount path for data: the parent of the folder `--data`, or of `--data-dir`."""
    data = train_flags.setting(command, "data")
    is_folder = data and data.value not in _BUILT_IN and not str(data.value).startswith("tfds:")
    return _folder(command, "data" if is_folder else "data_dir", _DATA)


def _folder(command: tuple[str, ...], field: str, default: PurePosixPath) -> PurePosixPath | None:
    """Returns the parent of the folder in a field, or the default if unset, or None for a URL.

    Raises:
        ConfigurationError: The value is a relative path.
    """
    setting = train_flags.setting(command, field)
    if setting is None:
        return default
    if "://" in str(setting.value):
        return None
    path = PurePosixPath(str(setting.value))
    if not path.is_absolute():
        raise ConfigurationError(
            f"{setting.place} {setting.value}: pods mount volumes at absolute paths. Use an "
            f"absolute path such as {default / path.name}."
        )
    return path.parent if path.parent != PurePosixPath("/") else path
