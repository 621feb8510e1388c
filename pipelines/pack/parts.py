"""The parts of a data set that several machines pack, and job files that pack all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import yaml

from pipelines.errors import DataError

AUTO = "auto"
#: Environment variables with the index of a process and the number of processes, the most specific
#: first.
_VARIABLES = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("JOB_COMPLETION_INDEX", ""),  # Kubernetes has no variable for the number
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # a batch script has no step, and is one process
)
#: Stands for `--image`. No registry accepts it, because repositories are lowercase.
_IMAGE = "REGISTRY/tfdist:TAG"
_NAME = "pack"


class Part(NamedTuple):
    """One of several parts of a data set that are packed separately.

    Attributes:
        number: Number of the part, from 0.
        num_parts: Number of all parts.
    """

    number: int
    num_parts: int

    @classmethod
    def parse(cls, text: str, environ: Mapping[str, str] = os.environ) -> Self:
        """Parses `3/16`, the third of sixteen, or `auto` and `auto/16`, by the process's index.

        Raises:
            DataError: The text is not a part, or no environment variable has the index.
        """
        number, slash, num_parts = text.partition("/")
        if number == AUTO and (not slash or num_parts.isdecimal()):
            index, name, count = _index(environ)
            count = int(num_parts) if slash else count
            if not 0 <= index < count:
                raise DataError(
                    f"--part {text}: expected {name} from 0 to the number of parts, got {index} "
                    f"and {count or 'no number'}; number the jobs from 0, and pass the number of "
                    "all parts, such as --part auto/16"
                )
            return cls(index, count)
        with contextlib.suppress(ValueError):
            if slash and 1 <= int(number) <= int(num_parts):
                return cls(int(number) - 1, int(num_parts))
        raise DataError(f"--part: expected a part such as 3/16, auto or auto/16, got {text!r}")


def _index(environ: Mapping[str, str]) -> tuple[int, str, int]:
    """Returns the index of this process, what tells it, and the number of processes or 0."""
    for name, count in _VARIABLES[:2]:
        if name in environ:
            return _number(environ, name), name, _number(environ, count) if count else 0
    if text := environ.get("TF_CONFIG"):  # set by tfdist.launch
        try:
            config = json.loads(text)
            chiefs, workers = (len(config["cluster"].get(task, [])) for task in ("chief", "worker"))
            offset = chiefs if config["task"]["type"] == "worker" else 0
            return offset + int(config["task"]["index"]), "TF_CONFIG", chiefs + workers
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(
                f"--part auto: expected a cluster and a task in TF_CONFIG, got {text!r}; unset it, "
                "or pass a part such as --part 3/16"
            ) from None
    for name, count in _VARIABLES[2:]:
        if name in environ and count in environ:
            return _number(environ, name), name, _number(environ, count)
    raise DataError(
        "--part auto: expected an array job of Slurm, an indexed job of Kubernetes, tfdist.launch "
        "or mpirun, found none of their variables; pass a part such as --part 3/16"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ.get(name, "0"))
    except ValueError:
        raise DataError(
            f"--part auto: expected a number in {name}, got {environ[name]!r}; unset it, or pass a "
            "part such as --part 3/16"
        ) from None


def slurm_script(arguments: Sequence[str], num_parts: int) -> str:
    """Returns an array job for `sbatch`. A task that failed can be submitted again."""
    command = shlex.join(_command(arguments, num_parts))
    return (
        f"#!/bin/bash\n#SBATCH --job-name={_NAME}\n#SBATCH --array=0-{num_parts - 1}\n"
        f"#SBATCH --output={_NAME}-%A-%a.log\n#SBATCH --requeue\n\nexec {command}\n"
    )


def kubernetes_job(arguments: Sequence[str], num_parts: int, image: str | None) -> str:
    """Returns the manifest of an indexed job, for `kubectl apply -f -`."""
    container = {
        "name": _NAME,
        "image": image or _IMAGE,
        # The kubelet would expand `$(NAME)`.
        "command": [word.replace("$", "$$") for word in _command(arguments, num_parts)],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": int(num_parts),
        "parallelism": int(num_parts),
        "backoffLimitPerIndex": 3,
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": _NAME}, "spec": spec}
    return yaml.safe_dump(job, sort_keys=False)


def _command(arguments: Sequence[str], num_parts: int) -> list[str]:
    return ["python", "-m", "pipelines.pack", *arguments, "--part", f"{AUTO}/{num_parts}"]


def without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns arguments without some flags and their values."""
    left, words = [], iter(arguments)
    for word in words:
        if word in flags:
            next(words, None)
        elif word.partition("=")[0] not in flags:
            left.append(word)
    return left
