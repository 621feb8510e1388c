"""The flags of `python -m tfdist.plan scaling`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt

from tfdist.console import durations, sizes, table_files
from tfdist.errors import ConfigurationError, did_you_mean
from tfdist.plan import flags
from tfdist.plan.scaling.exchange import EXCHANGES, PAYLOAD, Link, Wires

#: What strategies of the training command exchange by.
_BY = {"multi_worker": "ring", "horovod": "ring", "towers": "central_storage"}
#: Strategies that no exchange of gradients over workers limits.
_NOT_PLANNED = {
    "one_device": "it exchanges nothing",
    "mirrored": "it has the devices of one process: give ring, and --per-host",
    "pipeline": "between stages cross activations, and the bubble limits: "
    "python -m tfdist.bench pipeline measures it",
    "channel_split": "each layer exchanges activations, as its split wants: python -m tfdist.bench "
    "strategies measures it",
}

DESCRIPTION = "step time and efficiency over the number of workers, by how gradients cross"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    flags.add_network(parser)
    parser.add_argument("--batch", type=PositiveInt, default=32, metavar="N", help="of each worker")
    parser.add_argument(
        "--workers", default="1..256", metavar="N..N", help="doubled from the first to the last"
    )
    parser.add_argument("--bandwidth", default="25Gb", metavar="RATE", help="of a host's link")
    parser.add_argument("--latency", default="20us", metavar="TIME", help="of a host's link")
    parser.add_argument(
        "--per-host", type=PositiveInt, default=1, metavar="N", help="devices of a host"
    )
    parser.add_argument(
        "--inner-bandwidth", default="600Gb", metavar="RATE", help="between devices of a host"
    )
    parser.add_argument(
        "--inner-latency", default="5us", metavar="TIME", help="between devices of a host"
    )
    parser.add_argument(
        "--servers", type=PositiveInt, default=1, metavar="N", help="parameter servers"
    )
    parser.add_argument(
        "--strategy", nargs="+", default=["all"], metavar="NAME",
        help=f"all, or of {', '.join([*EXCHANGES, *_BY])}",
    )  # fmt: skip
    parser.add_argument(
        "--overlap", type=ClosedUnitInterval, default=0.0, metavar="X",
        help="part of the backward pass that hides an exchange, as buckets do: --bucket-mb",
    )  # fmt: skip
    parser.add_argument(
        "--compression", type=PositiveFloat, default=1.0, metavar="X",
        help="by which gradients shrink on their way; 2 for 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="FILE.json",
        help="a worker's step, as --save-profile writes it; left out: measured here",
    )  # fmt: skip
    parser.add_argument(
        "--save-profile", metavar="FILE.json", help="where to write what is measured"
    )
    parser.add_argument("--table", metavar="FILE", help="where to write the table, .md or .csv")
    parser.add_argument("--chart", metavar="FILE.png", help="where to draw it")


def run(
    batch: int,
    workers: str,
    bandwidth: str,
    latency: str,
    per_host: int,
    inner_bandwidth: str,
    inner_latency: str,
    servers: int,
    strategy: Sequence[str],
    overlap: float,
    compression: float,
    profile: str | None,
    save_profile: str | None,
    table: str | None,
    chart: str | None,
    **network: Any,
) -> None:
    """Plans and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: A flag that does not fit.
    """
    table_files.check(table, ".md", ".csv")
    table_files.check(chart, ".png")
    table_files.check(save_profile, ".json")
    numbers, names = _numbers(workers), _exchanges(strategy)
    outer = Link(PAYLOAD * sizes.bytes_per_second(bandwidth), durations.short_seconds(latency))
    inner = Link(sizes.bytes_per_second(inner_bandwidth), durations.short_seconds(inner_latency))
    wires = Wires(outer, inner, per_host, servers)
    chosen = flags.network(**network)

    from tfdist.plan.scaling import profiles, report

    one = profiles.read(profile) if profile else profiles.measure(chosen, batch)
    if save_profile:
        profiles.write(one, save_profile)
    report.Report(one, wires, overlap, compression, batch).conclude(names, numbers, table, chart)


def _exchanges(strategies: Sequence[str]) -> list[str]:
    """The names of exchanges, each once.

    Raises:
        ConfigurationError: A strategy whose step is not planned, or none.
    """
    if "all" in strategies:
        return list(EXCHANGES)
    for name in strategies:
        if name in _NOT_PLANNED:
            raise ConfigurationError(
                f"--strategy {name}: not planned over workers, for {_NOT_PLANNED[name]}."
            )
        if name not in EXCHANGES and name not in _BY:
            known = [*EXCHANGES, *_BY]
            raise ConfigurationError(
                f"--strategy {name}: expected all, or of {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    return list(dict.fromkeys(_BY.get(name, name) for name in strategies))


def _numbers(text: str) -> list[int]:
    """`1..256` as 1, 2, 4, ..., 256; or `2,3,4` as they are.

    Raises:
        ConfigurationError: It is neither.
    """
    try:
        if ".." not in text:
            numbers = [int(part) for part in text.split(",")]
        else:
            first, last = map(int, text.split(".."))
            numbers = [first]
            while first > 0 and numbers[-1] < last:
                numbers.append(min(2 * numbers[-1], last))
        if min(numbers) > 0:
            return numbers
    except ValueError:
        pass
    raise ConfigurationError(f"--workers {text}: expected 1..256, or numbers like 2,3,4.")
