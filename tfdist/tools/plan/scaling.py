"""`tfdist plan scaling`: predicts step time and efficiency by number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from tfdist.console import files, tables, units
from tfdist.errors import ConfigurationError, did_you_mean
from tfdist.tools.plan import network as networks
from tfdist.tools.plan.exchange import EXCHANGES, PAYLOAD, Profile, Step, Wires, step

#: The key of `EXCHANGES` for strategies of the training command.
_EXCHANGE_OF = {"multi_worker": "ring", "horovod": "ring", "towers": "central_storage"}
#: Strategies whose scaling cannot be predicted, with the reason.
_NOT_PLANNED = {
    "one_device": "it has no communication",
    "mirrored": "it uses the devices of one process. Use --strategy ring and --per-host",
    "pipeline": "its stages send activations, and its scaling is limited by the bubble",
    "tensor_parallel": "its layers communicate activations",
}

DESCRIPTION = (
    "predicts step time and efficiency by number of workers, for each kind of gradient reduction"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_plan_arguments(parser, "batch size of each worker", 32, "--bandwidth")
    parser.add_argument(
        "--workers", default="1..256", metavar="N..N",
        help="numbers of workers: powers of two from first to last, or a list like 2,3,4",
    )  # fmt: skip
    parser.add_argument(
        "--per-host", type=PositiveInt, default=1, metavar="N", help="devices per host"
    )
    parser.add_argument(
        "--inner-bandwidth", default="600Gb", metavar="RATE",
        help="bandwidth of the link between devices of a host",
    )  # fmt: skip
    parser.add_argument(
        "--inner-latency", default="5us", metavar="TIME",
        help="latency of the link between devices of a host",
    )  # fmt: skip
    parser.add_argument(
        "--servers", type=PositiveInt, default=1, metavar="N", help="number of parameter servers"
    )
    parser.add_argument(
        "--strategy", nargs="+", default=["all"], metavar="NAME",
        help=f"all, or one or more of {', '.join([*EXCHANGES, *_EXCHANGE_OF])}",
    )  # fmt: skip
    parser.add_argument(
        "--bucket-mb", type=NonNegativeFloat, default=0.0, metavar="N",
        help="size of gradient buckets, which are reduced during the backward pass; 0: all "
        "gradients are reduced after the backward pass",
    )  # fmt: skip
    parser.add_argument(
        "--compression", type=PositiveFloat, default=1.0, metavar="X",
        help="compression factor of gradients, such as 2 for 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="FILE.json",
        help="profile of a worker from --save-profile (default: measure it on this host)",
    )  # fmt: skip
    parser.add_argument(
        "--save-profile", metavar="FILE.json", help="write the measured profile to this file"
    )
    parser.add_argument("--chart", metavar="FILE.png", help="plot the results to this file")


def run(
    batch_size: int,
    workers: str,
    bandwidth: str,
    latency: str,
    per_host: int,
    inner_bandwidth: str,
    inner_latency: str,
    servers: int,
    strategy: Sequence[str],
    bucket_mb: float,
    compression: float,
    profile: str | None,
    save_profile: str | None,
    table: str | None,
    chart: str | None,
    **network: Any,
) -> None:
    """Plans and prints a table; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag has a value that does not fit.
    """
    tables.check_path(table, ".md", ".csv")
    tables.check_path(chart, ".png")
    tables.check_path(save_profile, ".json")
    numbers, names = _numbers(workers), _exchanges(strategy)
    outer = networks.link("--bandwidth", bandwidth, "--latency", latency, PAYLOAD)
    inner = networks.link("--inner-bandwidth", inner_bandwidth, "--inner-latency", inner_latency)
    wires = Wires(outer, inner, per_host, servers)
    chosen = networks.from_flags(**network)

    from tfdist.tools.plan import step_profile

    one = step_profile.read(profile) if profile else step_profile.measure(chosen, batch_size)
    if save_profile:
        step_profile.write(one, save_profile)
    plan = Plan(one, wires, bucket_mb * 2**20, compression, batch_size)
    steps = {name: [plan.step(name, number) for number in numbers] for name in names}
    plan.show(steps, numbers, table)
    if chart:
        _draw(steps, numbers, Path(chart))


class Plan(NamedTuple):
    """The settings that do not depend on the number of workers.

    Attributes:
        profile: The step of one worker.
        wires: The network between the workers.
        bucket_bytes: See `exchange.step`.
        compression: See `exchange.step`.
        batch: Batch size of each worker.
    """

    profile: Profile
    wires: Wires
    bucket_bytes: float
    compression: float
    batch: int

    def step(self, name: str, number: int) -> Step | None:
        """Returns the step of `number` workers with one kind of exchange."""
        return step(name, self.profile, number, self.wires, self.bucket_bytes, self.compression)

    def show(
        self, steps: dict[str, list[Step | None]], numbers: Sequence[int], path: str | None
    ) -> None:
        """Prints a row for each number of workers, and writes the table if `path` is given."""
        header = ["workers"]
        for name in steps:
            header += [f"{name}, ms", "efficiency", "examples/s"]
        rows = []
        for row, number in enumerate(numbers):
            cells = [self._cells(by_size[row], number) for by_size in steps.values()]
            rows.append([str(number), *(cell for group in cells for cell in group)])
        compact = [
            [row[0], *(f"{row[i]} ({row[i + 1]})" if row[i] else "" for i in range(1, len(row), 3))]
            for row in rows
        ]
        title = "milliseconds per step (efficiency)"
        tables.numbers(["workers", *steps], compact, title=title, num_names=0)
        seconds, num_bytes = self.profile.seconds, self.profile.gradient_bytes
        tables.text(
            f"Every worker has a batch of {self.batch}, with a compute time of "
            f"{seconds * 1e3:.1f} ms and {units.format_bytes(num_bytes)} of gradients."
        )
        if path:
            tables.write_file(Path(path), header, rows)

    def _cells(self, one: Step | None, number: int) -> list[str]:
        if one is None:
            return ["", "", ""]
        speed = number * self.batch / one.seconds
        return [f"{one.seconds * 1e3:.1f}", f"{one.efficiency:.0%}", f"{speed:.0f}"]


def _exchanges(strategies: Sequence[str]) -> list[str]:
    """Returns the names of the exchanges, each once.

    Raises:
        ConfigurationError: A strategy is unknown, or its scaling cannot be predicted.
    """
    if "all" in strategies:
        return list(EXCHANGES)
    for name in strategies:
        if name in _NOT_PLANNED:
            raise ConfigurationError(
                f"--strategy {name}: its scaling cannot be predicted, because {_NOT_PLANNED[name]}."
            )
        if name not in EXCHANGES and name not in _EXCHANGE_OF:
            names = [*EXCHANGES, *_EXCHANGE_OF]
            raise ConfigurationError(
                f"--strategy {name}: expected all, or one or more of {', '.join(names)}."
                f"{did_you_mean(name, names)}"
            )
    return list(dict.fromkeys(_EXCHANGE_OF.get(name, name) for name in strategies))


def _numbers(text: str) -> list[int]:
    """Parses `1..256` as 1, 2, 4, ..., 256, or a list such as `2,3,4`.

    Raises:
        ConfigurationError: The syntax is invalid.
    """
    try:
        if ".." not in text:
            numbers = [int(part) for part in text.split(",")]
        else:
            first, last = map(int, text.split(".."))
            numbers = [first] if first <= last else []
            while numbers and 0 < numbers[-1] < last:
                numbers.append(min(2 * numbers[-1], last))
        if min(numbers) > 0:
            return numbers
    except ValueError:
        pass
    raise ConfigurationError(f"--workers {text}: expected 1..256, or numbers like 2,3,4.")


def _draw(steps: dict[str, list[Step | None]], numbers: Sequence[int], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    times, efficiencies = figure.subplots(1, 2)
    for name, all_steps in steps.items():
        drawn = [(n, one) for n, one in zip(numbers, all_steps, strict=True) if one is not None]
        at = [n for n, _ in drawn]
        times.plot(at, [1e3 * one.seconds for _, one in drawn], marker="o", label=name)
        efficiencies.plot(at, [one.efficiency for _, one in drawn], marker="o", label=name)
    times.set(xscale="log", yscale="log", xlabel="workers", ylabel="milliseconds per step")
    efficiencies.set(xscale="log", xlabel="workers", ylabel="efficiency", ylim=(0, 1.05))
    for axes in (times, efficiencies):
        axes.grid(alpha=0.3)
        axes.legend()
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)
