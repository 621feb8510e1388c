"""The flags of `python -m tfdist.plan scaling`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt

from tfdist.console import durations, sizes, table_files
from tfdist.errors import ConfigurationError
from tfdist.plan import flags
from tfdist.plan.scaling.exchange import EXCHANGES, PAYLOAD, Link, Wires

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
        "--strategy", nargs="+", choices=["all", *EXCHANGES], default=["all"], help="which"
    )
    parser.add_argument(
        "--overlap", type=ClosedUnitInterval, default=0.0, metavar="X",
        help="part of the backward pass that hides an exchange; tfdist's comes after it",
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
    numbers = _numbers(workers)
    outer = Link(PAYLOAD * sizes.bytes_per_second(bandwidth), durations.short_seconds(latency))
    inner = Link(sizes.bytes_per_second(inner_bandwidth), durations.short_seconds(inner_latency))
    wires = Wires(outer, inner, per_host, servers)
    chosen = flags.network(**network)

    from tfdist.plan.scaling import profiles, report

    one = profiles.read(profile) if profile else profiles.measure(chosen, batch)
    if save_profile:
        profiles.write(one, save_profile)
    names = list(EXCHANGES) if "all" in strategy else list(strategy)
    report.Report(one, wires, overlap, compression, batch).conclude(names, numbers, table, chart)


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
