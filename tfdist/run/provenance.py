"""The information to reproduce a run: software, command line, seed, devices and sources."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.checkpoint.manifest import versions
from tfdist.cluster.remote import connection
from tfdist.config import TrainConfig

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

_GIT_SECONDS = 10.0


def provenance(config: TrainConfig, strategy: Strategy, recipe: Any) -> dict[str, Any]:
    """Returns the information, besides the software, to reproduce a run."""
    sources = {"tfdist": sys.modules["tfdist"], "recipe": recipe}
    return {
        "seed": config.seed,
        "deterministic": config.deterministic,
        "strategy": strategy.name,
        "devices": [*map(connection.short, strategy.devices)],
        "workers": strategy.group.size,
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


def software() -> dict[str, Any]:
    """Returns versions, the machine, and how and when the command was called."""
    return {
        **versions(),
        "machine": platform.platform(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
