"""Which run folder a command goes on with, and what may differ from the command that began it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tfdist.config import Outcome, Saving, Spread, StrategyOptions, TrainConfig
from tfdist.errors import ConfigurationError

#: In a run folder.
CHECKPOINTS, CONFIG = "checkpoints", "config.yaml"

#: What may be otherwise: who computes, how far, what is left behind; but no number.
_MAY_DIFFER = (
    {*Spread.model_fields, *StrategyOptions.model_fields, *Saving.model_fields}
    | {
        "run_dir",
        "verbose",
        "accumulate",
        "recompute",
        "steps_per_call",
        "run_eagerly",
        "jit_compile",
    }
    | {"max_time", *Outcome.model_fields}
) - {"sync_batch_norm"}


def begun(config: TrainConfig) -> Path | None:
    """Returns the folder of the run that a configuration with `resume: auto` goes on with.

    Args:
        config: With `run_dir`, that folder, if it has checkpoints; without, the newest folder under
            `runs/` of a run of this configuration that has not ended.

    Raises:
        ConfigurationError: The folder is of a run of another configuration.
    """
    if config.run_dir is not None:
        folder = Path(config.run_dir)
        if not (folder / CHECKPOINTS).exists():
            return None
        if other := _difference(config, folder):
            raise ConfigurationError(
                f"{folder} was begun with {other}: give the same command, or name another folder "
                "with --run-dir."
            )
        return folder
    folders = sorted(Path("runs").glob(f"*/{CHECKPOINTS}"), key=_age)
    for folder in (found.parent for found in folders):
        if not _has_ended(folder) and not _difference(config, folder):
            return folder
    return None


def clear(folder: Path) -> None:
    """Removes what a run that was never saved has written of its epochs, which come again."""
    if (folder / "model.keras").exists():
        return  # it has ended
    for name in ("metrics.jsonl", "metrics.csv"):
        (folder / name).unlink(missing_ok=True)


def _age(path: Path) -> float:
    return -path.stat().st_mtime


def _has_ended(folder: Path) -> bool:
    """Whether the newest checkpoint of a run is that of its end."""
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.store import Store

    store = Store(folder / CHECKPOINTS)
    for place in store.places():
        try:
            return bool(manifest.read(store.path(place))["ended"])
        except manifest.DamagedError:
            continue
    return True  # nothing to go on from


def _difference(config: TrainConfig, folder: Path) -> str:
    """The first field by which a run would come to other numbers; none: nothing."""
    try:
        told: Mapping[str, Any] = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, yaml.YAMLError):
        return f"no {CONFIG} that can be read"
    mine = config.model_dump(mode="json")
    for name, value in mine.items():
        if name not in _MAY_DIFFER and told.get(name) != value:
            return f"{name}={told.get(name)!r}, not {value!r}"
    return ""
