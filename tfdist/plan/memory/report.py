"""The table of what devices hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.console import sizes, table_files, tables
from tfdist.plan.memory.devices import Planner

NOTE = (
    "At the fullest moment of a step. 'activations' is all that is neither of the others: tensors "
    "of both passes and of the update, and what the allocator rounds them up to; workspaces of "
    "kernels, which depend on the card, are not in it."
)


def show(
    planner: Planner, strategies: Sequence[str], batch: int, room: int | None, path: str | None
) -> None:
    """Prints a row for each strategy and kind of device, and writes them where wanted.

    Args:
        planner: Knows what devices hold.
        strategies: Their names.
        batch: Global.
        room: Bytes of a card that are for tensors; None: nobody asks what fits.
        path: A file for the table; None: none.
    """
    header = ["strategy", "device", "weights", "gradients", "optimizer", "activations", "total"]
    if room is not None:
        header.append("largest batch")
    rows = []
    for name in strategies:
        largest = "" if room is None else str(planner.largest(name, room) or "none")
        for one in planner.on(name, batch):
            parts = (one.weights, one.gradients, one.optimizer, one.activations, one.total)
            rows.append([name, one.role, *map(sizes.in_words, parts)])
            if room is not None:
                rows[-1].append(largest)
                largest = ""
    tables.numbers(header, rows, title=f"a global batch of {batch}", num_names=2)
    tables.text(NOTE)
    if path:
        table_files.write(Path(path), header, rows)
