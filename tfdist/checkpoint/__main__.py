"""`python -m tfdist.checkpoint`: lists, inspects, verifies and exports checkpoints."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.console import command, tables
from tfdist.errors import ConfigurationError

_PROGRAM = "python -m tfdist.checkpoint"
_ACTIONS = {
    "list": "lists the checkpoints of a folder, the newest first",
    "inspect": "shows the manifest and the variables of the newest checkpoint",
    "verify": "checks every byte, and exits with 1 if a checkpoint is damaged",
    "export": "writes the newest model to TO: x.keras, x.weights.h5, or a folder for a SavedModel",
}


@command.main
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = command.parser(_PROGRAM, "Lists, inspects, verifies and exports checkpoints.")
    actions = "; ".join(f"{name}: {what}" for name, what in _ACTIONS.items())
    parser.add_argument("action", choices=list(_ACTIONS), help=actions)
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint, a folder of checkpoints, or a run folder"
    )
    parser.add_argument("to", metavar="TO", nargs="?", help="the file or folder that export writes")
    given = command.parse(parser, arguments)
    if (given.action == "export") != (given.to is not None):
        raise ConfigurationError(
            f"{given.action}: the argument TO is required for export, and only for export."
        )
    if given.action == "export":
        target = Path(given.to)
        from tfdist.checkpoint.export import export
        from tfdist.checkpoint.store import checkpoints_of

        newest = checkpoints_of(given.path)[0]
        export(newest, target)
        print(f"Exported the model of {newest} to {target}.")
        return 0
    return {"list": _list, "inspect": _inspect, "verify": _verify}[given.action](given.path)


def _list(path: str) -> int:
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.store import checkpoints_of

    rows, problems = [], []
    for checkpoint in checkpoints_of(path):
        name = posixpath.basename(checkpoint)
        try:
            content = manifest.read(checkpoint)
        except (manifest.DamagedError, manifest.UnreadableError) as error:
            problems.append(f"{error}.")
            rows.append([name, "damaged or unreadable", ""])
            continue
        size = sum(file["bytes"] for file in content["files"].values())
        rows.append([name, content["written"], f"{size / 1e6:.1f} MB"])
        rows += [["", f"{key}: {value:.4g}", ""] for key, value in content["logs"].items()]
    tables.numbers(["checkpoint", "written, logs", "size"], rows, num_names=2)
    for problem in problems:
        print(problem)
    return 0


def _inspect(path: str) -> int:
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.snapshot import Snapshot
    from tfdist.checkpoint.store import checkpoints_of, load

    path = checkpoints_of(path)[0]
    tables.facts([name, _text(value)] for name, value in manifest.read(path).items())
    saved = Snapshot.unpacked(load(path), path)
    rows = [
        [name, saved.paths[name], str(value.dtype), str(tuple(value.shape))]
        for name, value in saved.variables.items()
    ]
    tables.numbers(["variable", "Keras path", "dtype", "shape"], rows, num_names=4)
    return 0


def _verify(path: str) -> int:
    from tfdist.checkpoint import manifest
    from tfdist.checkpoint.store import checkpoints_of, load

    num_problems = 0
    for checkpoint in checkpoints_of(path):
        try:
            load(checkpoint)
        except (manifest.DamagedError, manifest.UnreadableError) as error:
            num_problems += 1
            print(f"{error}.")
        else:
            print(f"{checkpoint} is intact.")
    return 1 if num_problems else 0


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
