"""Assigns the GPUs of a host to its workers. Imports no TensorFlow."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence

from tfdist.cluster.record import Environ
from tfdist.errors import ClusterError, ConfigurationError, TooFewDevicesError

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Set by the launcher if it assigned GPUs to each worker, so that workers do not divide them again.
PER_WORKER = "TFDIST_GPUS_PER_WORKER"
#: Hides all GPUs from a process. Some container runtimes ignore an empty variable.
NONE_VISIBLE = {VISIBLE: "-1"}

#: An entry of CUDA_VISIBLE_DEVICES: an index, a UUID or its prefix, or a MIG instance.
_ENTRY = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
_NVIDIA_SMI_SECONDS = 60.0


def visible(environ: Environ) -> list[str] | None:
    """Returns the valid entries of `CUDA_VISIBLE_DEVICES`, or None if it is not set.

    CUDA ignores everything from the first invalid entry on: `0,-1,1` shows only GPU 0.

    Raises:
        ConfigurationError: An entry occurs twice. CUDA would then show no GPU at all, and a
            launcher would assign the GPU to two workers.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return None
    entries: list[str] = []
    for entry in text.split(","):
        if not _ENTRY.fullmatch(entry.strip()):
            break
        entries.append(entry.strip())
    _check_different(environ, [str(int(one)) if one.isdecimal() else one for one in entries])
    return entries


def _check_different(environ: Environ, names: Sequence[str]) -> None:
    """Raises an error if two entries of CUDA_VISIBLE_DEVICES have the same name."""
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigurationError(
            f"{VISIBLE}={environ[VISIBLE]} names the GPU {twice} twice. Name each GPU once."
        )


def installed() -> list[str]:
    """Returns the UUIDs of this host's GPUs from `nvidia-smi`; empty if that fails."""
    return [line for line in facts("uuid") if line.startswith("GPU-")]


def facts(fields: str) -> list[str]:
    """Returns a line about each GPU of this host from `nvidia-smi`; empty if that fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines()]


def assigned(num_gpus: int, local_rank: int, environ: Environ) -> dict[str, str]:
    """Returns the environment variables that make only its own GPUs visible to a process.

    Args:
        num_gpus: Number of GPUs per process.
        local_rank: Number of the process on this host. With 2 GPUs per process, process 1 gets the
            third and fourth GPU that are visible to the launcher.
        environ: The launcher's environment. An inherited `CUDA_VISIBLE_DEVICES` is divided: with
            `4,5,6,7` the processes get `4,5` and `6,7`.

    Raises:
        ConfigurationError: Too few GPUs are visible to the launcher.
    """
    begin, end = local_rank * num_gpus, (local_rank + 1) * num_gpus
    entries = visible(environ)
    available = f"{VISIBLE}={environ.get(VISIBLE)}"
    if entries is None:
        # Without nvidia-smi the number is unknown. The worker reports missing GPUs.
        number = len(installed()) or end
        entries, available = [str(i) for i in range(number)], f"this host has {number}"
    elif not all(entry.isdecimal() for entry in entries):
        uuids = installed()  # two names of the same GPU may differ
        _check_different(environ, [_uuid(entry, uuids) for entry in entries])
    if end > len(entries):
        raise ConfigurationError(
            f"--gpus-per-worker {num_gpus} needs {end} GPUs for {local_rank + 1} workers on this "
            f"host, but {available}. Use at most {len(entries) // num_gpus} workers, or fewer GPUs "
            "per worker."
        )
    return {VISIBLE: ",".join(entries[begin:end]), PER_WORKER: str(num_gpus)}


def identifiers(num_gpus: int) -> list[str]:
    """Returns a name for each visible GPU, which is the same in all processes.

    The names are UUIDs, or host and index without `nvidia-smi`. If a host has GPUs of different
    models, CUDA and `nvidia-smi` may order them differently by default. The names are still
    consistent within a host, because all its processes use the same order.

    Args:
        num_gpus: Number of GPUs that TensorFlow sees.
    """
    uuids, entries = installed(), visible(os.environ)
    names = uuids if entries is None else [_uuid(entry, uuids) for entry in entries]
    if len(names) != num_gpus:  # TensorFlow ignores GPUs that are too old
        names = [str(i) for i in range(num_gpus)]
    host = socket.gethostname()
    return [name if name.startswith(("GPU-", "MIG-")) else f"{host}:{name}" for name in names]


def _uuid(entry: str, uuids: Sequence[str]) -> str:
    """Returns the UUID of an entry of CUDA_VISIBLE_DEVICES, or the entry if it is unknown."""
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < len(uuids) else entry
    return next((uuid for uuid in uuids if uuid.startswith(entry)), entry)


def divide(claims: Sequence[Sequence[str]], share: bool) -> list[list[int]]:
    """Divides GPUs among the workers that see the same GPUs, in the order of ranks.

    Takes time and memory of O(workers).

    Args:
        claims: By rank, the `identifiers` of the GPUs that a worker sees or requests.
        share: Whether several workers may use the same GPU if there are too few.

    Returns:
        By rank, the positions of the worker's GPUs in its list.

    Raises:
        TooFewDevicesError: There are fewer GPUs than workers.
        ClusterError: Workers see different sets of GPUs that overlap.
    """
    users: dict[str, list[int]] = {}
    for rank, gpus in enumerate(claims):
        for gpu in gpus:
            users.setdefault(gpu, []).append(rank)
    divided: list[list[int]] = []
    for rank, gpus in enumerate(claims):
        peers = users[gpus[0]] if gpus else [rank]
        for gpu in gpus:
            if users[gpu] != peers:
                others = sorted({*users[gpu], *peers} - {rank})
                raise ClusterError(
                    f"Rank {rank} and rank {_format_ranks(others)} use different sets of GPUs that "
                    f"overlap in {gpu}. Set the same {VISIBLE} for all workers of a host, which "
                    "divide the GPUs, or assign distinct GPUs to each worker."
                )
        reference = claims[peers[0]]
        each, number = len(reference) // len(peers), peers.index(rank)
        if len(peers) == 1:
            chosen = list(gpus)
        elif each:
            chosen = list(reference[number * each : (number + 1) * each])
        elif share:
            chosen = [reference[number % len(reference)]]
        else:
            raise TooFewDevicesError(
                f"{len(peers)} workers on one host (rank {_format_ranks(peers)}) see "
                f"{len(reference)} GPU{'s' * (len(reference) > 1)}, but NCCL needs at least one "
                f"per worker: start at most {len(reference)} on this host, or let them share GPUs "
                "with communication='ring'."
            )
        divided.append([gpus.index(gpu) for gpu in chosen])
    return divided


def _format_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
