"""What the tables at the beginning and at the end of a training say of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.strategies.pipeline import bubble
from tfdist.strategies.pipeline.stages import Stages


def rows(
    stages: Stages | None, devices: Sequence[str], num_micro_batches: int, order: str
) -> dict[str, str]:
    """Returns lines about the stages, the micro-batches and the bubble.

    Args:
        stages: Of the model; None: it is cut when the shapes of the data are known.
        devices: One a stage.
        num_micro_batches: Of a batch.
        order: Of these.
    """
    kept = bubble.in_memory(len(devices), num_micro_batches, order)
    alike = num_micro_batches if len(set(kept)) == 1 else ", ".join(map(str, kept))
    shares = stages.shares() if stages else None
    best = bubble.speed_up(shares or [1 / len(devices)] * len(devices), num_micro_batches)
    alike_cost = "" if shares else " where stages cost the same"
    return {
        "shard policy": "each global batch is split into micro-batches",
        **_by_stage(stages, devices),
        "micro-batches": f"{num_micro_batches}, {order}; a stage keeps {alike}",
        "bubble": f"{1 - best / len(devices):.0%} of the devices' time{alike_cost}: {best:.2f} "
        f"times one device at most, of {len(devices)}",
    }


def waited(share: float | None) -> dict[str, str]:
    """Returns a line about the share of the stages' time in which they waited, if it is known."""
    return {} if share is None else {"bubble": f"{share:.0%} of the devices' time, as measured"}


def _by_stage(stages: Stages | None, devices: Sequence[str]) -> dict[str, str]:
    if stages is None:
        return {"stages": f"{len(devices)}, cut when the shapes of the data are known"}
    sizes = stages.num_parameters()
    total, shares = max(sum(sizes), 1), stages.shares()
    costs = [f", {share:.0%} of the time" for share in shares] if shares else [""] * len(sizes)
    if (held := stages.num_bytes()) is not None:
        costs = [f", {num_bytes / 1e6:,.1f} MB" for num_bytes in held]
    return {
        f"stage {number}": (
            f"{first} .. {last}: {size:,} parameters ({size / total:.0%}){cost}, on {device}"
        )
        for number, ((first, last), size, cost, device) in enumerate(
            zip(stages.ends(), sizes, costs, devices, strict=True)
        )
    }
