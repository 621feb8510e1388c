"""Which GPUs of a host each worker uses. Imports no TensorFlow."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence

from tfdist.cluster.record import Environ
from tfdist.errors import ClusterError, ConfigurationError

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Set by the launcher for workers that it gave GPUs of their own, so that they do not divide them.
PER_WORKER = "TFDIST_GPUS_PER_WORKER"
#: Hides every GPU from a process; an empty variable is ignored by some container runtimes.
NONE_VISIBLE = {VISIBLE: "-1"}

#: An entry of CUDA_VISIBLE_DEVICES: an index, a UUID or its beginning, or a slice of a GPU.
_ENTRY = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
_NVIDIA_SMI = ("--query-gpu=uuid", "--format=csv,noheader")
_NVIDIA_SMI_SECONDS = 60.0


def visible(environ: Environ) -> list[str] | None:
    """Returns the entries of `CUDA_VISIBLE_DEVICES` that CUDA honors; None where it is not set.

    CUDA stops at the first entry that is no GPU: `0,-1,1` shows GPU 0 only.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return None
    entries: list[str] = []
    for entry in text.split(","):
        if not _ENTRY.fullmatch(entry.strip()):
            break
        entries.append(entry.strip())
    return entries


def installed() -> list[str]:
    """Returns the UUIDs of this host's GPUs as `nvidia-smi` lists them; empty where it cannot."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *_NVIDIA_SMI],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.startswith("GPU-")]


def assigned(num_gpus: int, place: int, environ: Environ) -> dict[str, str]:
    """Returns the variables that show one process of this host its own GPUs.

    Args:
        num_gpus: GPUs of the process.
        place: Number of the process on this host: process 1 of 2 GPUs each has the third and the
            fourth of those that the launcher sees.
        environ: The launcher's variables. An inherited `CUDA_VISIBLE_DEVICES` is divided: with
            `4,5,6,7` the processes get `4,5` and `6,7`.

    Raises:
        ConfigurationError: The launcher sees too few GPUs.
    """
    begin, end = place * num_gpus, (place + 1) * num_gpus
    entries = visible(environ)
    seen = f"{VISIBLE}={environ.get(VISIBLE)}"
    if entries is None:
        # Without nvidia-smi nobody knows how many there are; the worker reports a missing GPU.
        number = len(installed()) or end
        entries, seen = [str(i) for i in range(number)], f"this host has {number}"
    if end > len(entries):
        raise ConfigurationError(
            f"--gpus-per-worker {num_gpus} needs {end} GPUs for {place + 1} workers on this host, "
            f"but {seen}: use at most {len(entries) // num_gpus} workers or fewer GPUs for each."
        )
    return {VISIBLE: ",".join(entries[begin:end]), PER_WORKER: str(num_gpus)}


def identifiers(num_gpus: int) -> list[str]:
    """Returns a name for each GPU that this process sees, equal in all processes that see that GPU.

    The names are UUIDs, or host and index where `nvidia-smi` is missing. By default CUDA and
    `nvidia-smi` may number GPUs of different models differently; processes of one host still
    agree, because they all number them in the same way.

    Args:
        num_gpus: How many GPUs TensorFlow sees.
    """
    uuids, entries = installed(), visible(os.environ)
    names = uuids if entries is None else [_uuid(entry, uuids) for entry in entries]
    if len(names) != num_gpus:  # TensorFlow leaves GPUs out that are too old for it
        names = [str(i) for i in range(num_gpus)]
    host = socket.gethostname()
    return [name if name.startswith(("GPU-", "MIG-")) else f"{host}:{name}" for name in names]


def _uuid(entry: str, uuids: Sequence[str]) -> str:
    """Returns the UUID of an entry of CUDA_VISIBLE_DEVICES, or the entry where it is not known."""
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < len(uuids) else entry
    return next((uuid for uuid in uuids if uuid.startswith(entry)), entry)


def divide(claims: Sequence[Sequence[str]], share: bool) -> list[list[int]]:
    """Divides GPUs among the workers that see the same ones, in the order of their ranks.

    Takes time and memory of O(workers).

    Args:
        claims: By rank, the `identifiers` of the GPUs that a worker sees or asks for.
        share: Whether several workers may use one GPU where there are too few.

    Returns:
        By rank, the positions in its list of the GPUs that the worker uses.

    Raises:
        ClusterError: There are fewer GPUs than workers, or workers see different sets of GPUs that
            overlap.
    """
    users: dict[str, list[int]] = {}
    for rank, gpus in enumerate(claims):
        for gpu in gpus:
            users.setdefault(gpu, []).append(rank)
    divided: list[list[int]] = []
    for rank, gpus in enumerate(claims):
        peers = users[gpus[0]] if gpus else [rank]
        _check_same(gpus, users, peers, rank)
        reference = claims[peers[0]]
        each, number = len(reference) // len(peers), peers.index(rank)
        if len(peers) == 1:
            own = list(gpus)
        elif each:
            own = list(reference[number * each : (number + 1) * each])
        elif share:
            own = [reference[number % len(reference)]]
        else:
            raise ClusterError(
                f"{len(peers)} workers on one host (rank {_listed(peers)}) see {len(reference)} "
                f"GPU{'s' * (len(reference) > 1)}, but NCCL needs at least one for each worker: "
                f"start at most {len(reference)} on this host, or let them share GPUs with "
                "communication='ring'."
            )
        divided.append([gpus.index(gpu) for gpu in own])
    return divided


def _check_same(
    gpus: Sequence[str], users: dict[str, list[int]], peers: list[int], rank: int
) -> None:
    for gpu in gpus:
        if users[gpu] != peers:
            others = sorted({*users[gpu], *peers} - {rank})
            raise ClusterError(
                f"Rank {rank} and rank {_listed(others)} use different sets of GPUs that overlap "
                f"in {gpu}: give all workers of a host the same {VISIBLE}, which they divide, or "
                "each GPUs of its own."
            )


def _listed(ranks: Sequence[int]) -> str:
    """Returns at most eight ranks as text."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
