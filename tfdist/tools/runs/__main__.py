"""`tfdist runs`: lists, shows, compares and deletes runs. Imports no TensorFlow."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat

from pipelines import storage
from pipelines.storage import AnyPath
from tfdist.console import command, tables, units
from tfdist.errors import ConfigurationError
from tfdist.run.records import KINDS, read_ledger
from tfdist.tools.runs import folders
from tfdist.tools.runs.folders import Run

_PROGRAM = "tfdist runs"
_ACTIONS = {
    "list": "shows runs, the newest first",
    "show": "shows where the time of a run went, over all restarts",
    "page": "writes a page with curves, time and settings of a run, report.html in its folder",
    "compare": "shows the metrics of runs side by side with the settings that differ, and plots "
    "curves",
    "clean": "deletes the named runs, or all without a complete epoch",
}
#: Which runs each action uses if the command names none.
_DEFAULTS = {
    "list": "all",
    "show": "the newest",
    "page": "the newest",
    "compare": "the two newest",
    "clean": "all without a complete epoch",
}
_FLAGS_WITH_VALUE = ("--folder", "--picture", "--price")


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and returns its exit code."""
    parser = command.parser(_PROGRAM, "Lists, shows, compares and deletes runs.")
    actions = parser.add_subcommands(dest="action")
    parsers = {name: _action_parser(name, what) for name, what in _ACTIONS.items()}
    for name, description in _ACTIONS.items():
        actions.add_subcommand(name, parsers[name], help=description)
    words = sys.argv[1:] if arguments is None else arguments
    values = command.parse(parser, _flags_last(words), subparsers=parsers)
    given = values[values.action]
    folder = storage.at(given.folder)
    chosen = [folders.read(_path(folder, name)) for name in given.names]
    if values.action == "list":
        for one in chosen or folders.below(folder):
            values_of_run = one.metrics()
            validation = {n: v for n, v in values_of_run.items() if n.startswith("val_")}
            shown = validation or values_of_run
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
            epochs = f"{len(one.epochs)} of {one.config.get('epochs', '?')} epochs"
            size = units.format_bytes(one.num_bytes)
            print(f"{one.path}\n    {one.started}  {one.state}, {epochs}, {size}  {metrics}")
    elif values.action == "show":
        for one in chosen or folders.below(folder)[:1]:
            _show(one, given.price)
    elif values.action == "page":
        from tfdist.tools.runs import page  # imported here, because matplotlib takes a second

        for one in chosen or folders.below(folder)[:1]:
            print(page.write(one))
    elif values.action == "compare":
        _compare(chosen or folders.below(folder)[:2], Path(given.picture))
    else:
        empty = (r for r in folders.below(folder) if r.state == "stopped" and not r.epochs)
        _clean(chosen or list(empty), given.yes)


def _action_parser(name: str, description: str) -> ArgumentParser:
    parser = command.parser(f"{_PROGRAM} {name}", description)
    parser.add_argument(
        "names",
        metavar="RUN",
        nargs="*",
        help=f"run folders, or names of folders in --folder; default: {_DEFAULTS[name]}",
    )
    parser.add_argument(
        "--folder",
        default="runs",
        metavar="DIR",
        help="folder that contains the runs; local or s3://...",
    )
    if name == "show":
        parser.add_argument(
            "--price", type=PositiveFloat, metavar="P", help="price of an hour of all machines"
        )
    if name == "compare":
        parser.add_argument(
            "--picture", default="curves.png", metavar="FILE", help="image file that is written"
        )
    if name == "clean":
        parser.add_argument("--yes", action="store_true", help="delete without confirmation")
    return parser


def _flags_last(words: Sequence[str]) -> list[str]:
    """Moves flags to the end: argparse refuses names after a flag if there are some before it."""
    names, flags, rest = [], [], iter(words)
    for word in rest:
        if not word.startswith("--"):
            names.append(word)
            continue
        flags.append(word)
        if word in _FLAGS_WITH_VALUE:
            flags += itertools.islice(rest, 1)
    return names + flags


def _path(folder: AnyPath, name: str) -> AnyPath:
    return storage.at(name) if storage.is_url(name) or Path(name).is_dir() else folder / name


def _show(run: Run, price: float | None) -> None:
    """Prints where the time of a run went."""
    if (ledger := read_ledger(run.path)) is None:
        raise ConfigurationError(f"{run.path} has no ledger.json: an older version wrote it.")
    rows = [
        [
            KINDS.get(name, name),
            f"{seconds:.1f}",
            f"{seconds / max(ledger.wall, 1e-9):.1%}",
            *([f"{seconds / 3600 * price:.4g}"] if price else []),
        ]
        for name, seconds in [*ledger.seconds.items(), ("all", ledger.wall)]
    ]
    header = ["time", "seconds", "share", *(["cost"] if price else [])]
    tables.numbers(header, rows, title=str(run.path))
    tables.text(
        f"goodput {ledger.goodput:.1%}: computing {ledger.steps} steps that the run has kept; "
        f"{ledger.failures} failures, {ledger.saves} checkpoints"
    )
    if ledger.exchange is not None:
        share = ledger.exchange * ledger.steps / max(ledger.seconds["compute"], 1e-9)
        tables.text(
            f"exchange: {1e3 * ledger.exchange:.3g} ms per step if measured alone, at most "
            f"{min(share, 1.0):.0%} of computing, with which it overlaps"
        )
    if (interval := ledger.checkpoint_interval()) is not None:
        tables.text(
            f"proposed: --checkpoint-every {max(1, round(interval))}s, for checkpoints of "
            f"{ledger.save_seconds / ledger.saves:.2g} s and a failure every "
            f"{ledger.wall / ledger.failures:.0f} s (Daly 2006)"
        )


def _where_time_went(runs: Sequence[Run], letters: Sequence[str]) -> None:
    """Prints the time per step by kind, and what makes the slowest run slower than the fastest."""
    ledgers = [read_ledger(run.path) for run in runs]
    if not all(ledger and ledger.steps for ledger in ledgers):
        return
    per_step = [
        {name: 1e3 * s / one.steps for name, s in one.seconds.items()} for one in ledgers if one
    ]
    rows = [[what, *(f"{one[name]:.2f}" for one in per_step)] for name, what in KINDS.items()]
    totals = [sum(one.values()) for one in per_step]
    tables.numbers(["ms per step", *letters], [*rows, ["all", *(f"{t:.2f}" for t in totals)]])
    slow, fast = totals.index(max(totals)), totals.index(min(totals))
    name = max(KINDS, key=lambda kind: per_step[slow][kind] - per_step[fast][kind])
    difference = per_step[slow][name] - per_step[fast][name]
    tables.text(
        f"{letters[slow]} takes {totals[slow] - totals[fast]:.2f} ms more per step than "
        f"{letters[fast]}, most of it for {KINDS[name]}: {difference:.2f} ms."
    )


def _compare(runs: Sequence[Run], picture: Path) -> None:
    """Prints a column per run, and draws a panel per metric."""
    if len(runs) < 2:
        raise ConfigurationError("compare needs at least two runs: add their names to the command.")
    tables.check_path(str(picture), ".png", ".jpg", ".pdf", ".svg")
    letters = [chr(ord("A") + i % 26) + str(i // 26 or "") for i in range(len(runs))]
    tables.facts((letter, str(run.path)) for letter, run in zip(letters, runs, strict=True))
    names = list(dict.fromkeys(name for run in runs for name in run.metrics()))
    values = [run.metrics() for run in runs]
    rows = [[n, *(f"{v[n]:.4f}" if n in v else "" for v in values)] for n in names]
    tables.numbers(["last epoch", *letters], rows)
    fields = list(dict.fromkeys(name for run in runs for name in run.config))
    differences = [
        [name, *texts]
        for name in fields
        if len(set(texts := [str(run.config.get(name, "")) for run in runs])) > 1
    ]
    if differences:
        tables.numbers(["setting", *letters], differences)
    else:
        print("All settings are the same.")
    _where_time_went(runs, letters)
    _draw(runs, letters, names, picture)
    print(f"Curves: {picture}")


def _draw(runs: Sequence[Run], letters: Sequence[str], names: Sequence[str], picture: Path) -> None:
    from tfdist.console.figures import Curve, panels

    curves = {
        name: [
            Curve(letter, range(1, len(curve) + 1), curve)
            for run, letter in zip(runs, letters, strict=True)
            if (curve := run.curve(name))
        ]
        for name in names
    }
    panels(curves, "epoch").savefig(picture, dpi=100)


def _clean(runs: Sequence[Run], yes: bool) -> None:
    """Deletes run folders, after a confirmation."""
    if running := [run for run in runs if run.state == "running"]:
        raise ConfigurationError(
            f"{running[0].path} is still running. Stop it before you delete its folder."
        )
    if not runs:
        print("Nothing to delete: every run has finished an epoch.")
        return
    for run in runs:
        print(f"{run.path}  {len(run.epochs)} epochs, {units.format_bytes(run.num_bytes)}")
    if not yes and _answer(f"Delete these {len(runs)} folders? [y/N] ") != "y":
        print("Nothing was deleted.")
        return
    for run in runs:
        folders.remove(run)
    print(f"Deleted {len(runs)} folders.")


def _answer(question: str) -> str:
    try:
        return input(question).strip().lower()
    except EOFError:
        raise ConfigurationError(
            "Nothing was deleted, because there is no terminal for the answer. Add --yes."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
