"""Table and chart of a scaling plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfdist.console import files, sizes, table_files, tables
from tfdist.plan.scaling.exchange import Profile, Step, Wires, step


class Report(NamedTuple):
    """What is planned.

    Attributes:
        profile: Of one worker.
        wires: That join the workers.
        overlap: As of `exchange.step`.
        compression: As of `exchange.step`.
        batch: Of each worker.
    """

    profile: Profile
    wires: Wires
    overlap: float
    compression: float
    batch: int

    def conclude(
        self, names: Sequence[str], numbers: Sequence[int], table: str | None, chart: str | None
    ) -> None:
        """Prints a row for each number of workers, and writes and draws them where wanted."""
        steps = {name: [self._step(name, number) for number in numbers] for name in names}
        header = ["workers"]
        for name in names:
            header += [f"{name}, ms", "efficiency", "examples/s"]
        rows = []
        for place, number in enumerate(numbers):
            cells = [self._cells(steps[name][place], number) for name in names]
            rows.append([str(number), *(cell for group in cells for cell in group)])
        compact = [
            [row[0], *(f"{row[i]} ({row[i + 1]})" if row[i] else "" for i in range(1, len(row), 3))]
            for row in rows
        ]
        tables.numbers(
            ["workers", *names], compact, title="milliseconds of a step (efficiency)", num_names=0
        )
        seconds, num_bytes = self.profile.seconds, self.profile.gradient_bytes
        tables.text(
            f"A worker computes {seconds * 1e3:.1f} ms for its {self.batch} examples, and its "
            f"gradients are {sizes.in_words(num_bytes)}; every worker has as many examples."
        )
        if table:
            table_files.write(Path(table), header, rows)
        if chart:
            _draw(steps, numbers, Path(chart))

    def _step(self, name: str, number: int) -> Step | None:
        return step(name, self.profile, number, self.wires, self.overlap, self.compression)

    def _cells(self, one: Step | None, number: int) -> list[str]:
        if one is None:
            return ["", "", ""]
        speed = number * self.batch / one.seconds
        return [f"{one.seconds * 1e3:.1f}", f"{one.efficiency:.0%}", f"{speed:.0f}"]


def _draw(steps: dict[str, list[Step | None]], numbers: Sequence[int], path: Path) -> None:
    """Draws times and efficiencies over the number of workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    times, efficiencies = figure.subplots(1, 2)
    for name, all_steps in steps.items():
        found = [(n, one) for n, one in zip(numbers, all_steps, strict=True) if one is not None]
        at = [n for n, _ in found]
        times.plot(at, [1e3 * one.seconds for _, one in found], marker="o", label=name)
        efficiencies.plot(at, [one.efficiency for _, one in found], marker="o", label=name)
    times.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms of a step")
    efficiencies.set(xscale="log", xlabel="workers", ylabel="efficiency", ylim=(0, 1.05))
    for axes in (times, efficiencies):
        axes.grid(alpha=0.3)
        axes.legend()
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)
