"""What steps over a link took, as ratios to computing and sending, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.bench.interleave import ratio, spread
from tfdist.bench.scaling.link_answers import AT_ONCE, COMPUTE, IN_BUCKETS, SEND, Taken

#: What a step in buckets may take, to the longer of computing and sending and the last bucket.
GOAL = 1.15


def judged(facts: Mapping[str, Any], taken: Mapping[str, Sequence[Taken]]) -> dict[str, Any]:
    """Returns times and their ratios.

    Args:
        facts: What there is to send.
        taken: Of the slowest worker, by what was measured.
    """
    times = {name: [one.ms for one in own] for name, own in taken.items()}
    cpu = {name: [one.cpu_ms for one in own] for name, own in taken.items()}
    compute, send = times[COMPUTE], times[SEND]
    last = [facts["last_bucket"] * ms for ms in send]
    # What they would be compared with: by computing that is alone on its core, and by one that
    # shares it with what sends.
    base = {
        "to_sum": [a + b for a, b in zip(compute, send, strict=True)],
        "to_longer": [max(a, b) + c for a, b, c in zip(compute, send, last, strict=True)],
        "to_core": [
            max(a + d, b) + c for a, b, c, d in zip(compute, send, last, cpu[SEND], strict=True)
        ],
        "to_at_once": times[AT_ONCE],
    }
    steps = {
        name: {to: ratio(own, base[to])._asdict() for to in base}
        for name, own in times.items()
        if name not in (COMPUTE, SEND)
    }
    goal = steps[IN_BUCKETS]["to_longer"]
    goal |= {"goal": GOAL, "met": goal["median"] <= GOAL}
    return {
        **facts,
        "ms": {name: spread(own)._asdict() for name, own in times.items()},
        "cpu_ms": {name: spread(own)._asdict() for name, own in cpu.items()},
        "steps": steps,
        "samples_ms": times,
    }
