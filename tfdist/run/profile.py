"""`--profile`: a table of how the time of a step divides into compute, communication and input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.console import tables
from tfdist.strategies import STRATEGIES

if TYPE_CHECKING:
    from tfdist.callbacks.profile import Profile
    from tfdist.strategies import Strategy


def exchange(strategy: Strategy, model: Any) -> tuple[float, float] | None:
    """Measures an all-reduce of as many bytes as the gradients have, on its own.

    All workers call it together.

    Args:
        strategy: Strategy of the run.
        model: The trained `keras.Model`.

    Returns:
        Seconds and bytes; None if there is no synchronous all-reduce.
    """
    from tfdist.groups.traffic import measure_all_reduce

    if strategy.num_replicas == 1 or STRATEGIES[strategy.name].asynchronous:
        return None
    num_bytes = sum(4 * int(np.prod(w.shape)) for w in model.trainable_variables)
    return measure_all_reduce(strategy, num_bytes)[0], num_bytes


def show(profile: Profile, exchanged: tuple[float, float] | None) -> None:
    """Prints the table.

    Args:
        profile: The callback of the training.
        exchanged: The result of `exchange`.
    """
    rows = table(profile, exchanged)
    if not rows:
        tables.text(
            "profile: no steps to measure: the first two calls start up, "
            f"{profile.traced} steps were traced, and none came after them; train for longer."
        )
        return
    tables.numbers(("a step", "ms", "share"), rows)
    words = f"over {profile.seconds.steps} steps; {profile.traced} others are in the trace"
    if exchanged:
        words += (
            f"; the exchange of {exchanged[1] / 1e6:.3g} MB of gradients was measured by itself: "
            "what overlaps with computing counts as exchange"
        )
    tables.text(f"{words}.")


def table(profile: Profile, exchanged: tuple[float, float] | None) -> list[tuple[str, str, str]]:
    """Returns rows of a name, milliseconds per step, and the fraction of the step."""
    taken = profile.seconds
    if not taken.steps:
        return []
    alone = min(exchanged[0] if exchanged else 0.0, (taken.in_calls - taken.waited) / taken.steps)
    parts = {
        "computing": (taken.in_calls - taken.waited) / taken.steps - alone,
        "exchange": alone,
        "data": taken.waited / taken.steps,
        "Python": taken.around / taken.steps,
    }
    total = sum(parts.values())
    parts["all"] = total
    return [(name, f"{s * 1e3:.3f}", f"{s / total:.0%}") for name, s in parts.items()]
