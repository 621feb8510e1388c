"""The strategies that lay one model over several devices, and their flags. No TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

#: Their names, as of `tfdist.strategies`.
OVER = ("pipeline", "channel_split", "sharded")
SHARDS = ("optimizer", "gradients", "parameters")


class Chosen(NamedTuple):
    """A strategy with its options."""

    strategy: str
    options: dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--micro-batches", type=PositiveInt, default=4, metavar="N", help="of pipeline"
    )
    parser.add_argument(
        "--order", choices=["gpipe", "1f1b"], default="gpipe", help="of pipeline's micro-batches"
    )
    parser.add_argument(
        "--shard", nargs="+", choices=list(SHARDS), default=list(SHARDS), help="of sharded, each"
    )


def chosen(
    names: Iterable[str],
    micro_batches: int = 4,
    order: str = "gpipe",
    shard: Sequence[str] = SHARDS,
) -> dict[str, Chosen]:
    """Returns what names and flags say, by the name of a row; other strategies are left out."""
    found: dict[str, Chosen] = {}
    for name in names:
        if name == "sharded":
            found |= {f"sharded {what}": Chosen(name, {"shard": what}) for what in shard}
        elif name == "pipeline":
            options = {"micro_batches": micro_batches, "order": order}
            found[name] = Chosen(name, options)
        elif name in OVER:
            found[name] = Chosen(name, {})
    return found
