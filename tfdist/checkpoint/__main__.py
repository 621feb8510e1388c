"""`python -m tfdist.checkpoint`: lists, describes, checks and exports checkpoints."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.console import command, tables
from tfdist.errors import ConfigurationError

_PROGRAM = "python -m tfdist.checkpoint"
_ACTIONS = {
    "list": "shows the checkpoints of a folder, the newest first",
    "inspect": "shows what a checkpoint says of itself, and its variables",
    "verify": "reads every byte; 1 where a checkpoint is not whole",
    "export": "writes the newest model to TO: x.keras, x.weights.h5, or a folder for a SavedModel",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = command.parser(_PROGRAM, "Looks after the checkpoints of a run.")
    words = "; ".join(f"{name}: {what}" for name, what in _ACTIONS.items())
    parser.add_argument("action", choices=list(_ACTIONS), help=words)
    parser.add_argument("path", metavar="PATH", help="a checkpoint, a folder of them, or a run")
    parser.add_argument(
        "to", metavar="TO", nargs="?", help="of export: the file or folder to write"
    )

    def run() -> int:
        given = command.parse(parser, arguments)
        if (given.action == "export") != (given.to is not None):
            raise ConfigurationError(f"{given.action}: TO goes with export, and export needs one.")
        if given.action == "export":
            return _export(given.path, Path(given.to))
        return {"list": _list, "inspect": _inspect, "verify": _verify}[given.action](given.path)

    return command.run(run)


def _list(path: str) -> int:
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.store import checkpoints_of

    rows = []
    for checkpoint in checkpoints_of(path):
        name = posixpath.basename(checkpoint)
        try:
            told = manifest.read(checkpoint)
        except manifest.DamagedError as error:
            rows.append([name, str(error), "", "", ""])
            continue
        size = sum(file["bytes"] for file in told["files"].values())
        logs = ", ".join(f"{key} {value:.4g}" for key, value in told["logs"].items())
        rows.append([name, logs, told["written"], str(told["step"]), f"{size / 1e6:.1f} MB"])
    tables.numbers(["checkpoint", "logs", "written", "step", "size"], rows, num_names=3)
    return 0


def _inspect(path: str) -> int:
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.snapshot import Packed, Snapshot
    from tfdist.checkpoint.store import checkpoints_of

    path = checkpoints_of(path)[0]
    told = manifest.verify(path)
    tables.facts([name, _text(value)] for name, value in told.items())
    saved = Snapshot.unpacked(Packed.read(path))
    rows = [
        [name, saved.paths[name], str(value.dtype), str(tuple(value.shape))]
        for name, value in saved.variables.items()
    ]
    tables.numbers(["variable", "called", "dtype", "shape"], rows, num_names=4)
    return 0


def _verify(path: str) -> int:
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.store import checkpoints_of

    damaged = 0
    for name in checkpoints_of(path):
        try:
            manifest.verify(name)
        except manifest.DamagedError as error:
            damaged += 1
            print(f"{error}.")
        else:
            print(f"{name} is whole.")
    return 1 if damaged else 0


def _export(path: str, target: Path) -> int:
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.export import export
    from tfdist.checkpoint.store import checkpoints_of

    newest = checkpoints_of(path)[0]
    manifest.verify(newest)
    export(newest, target)
    print(f"{target}: the model of {newest}.")
    return 0


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
