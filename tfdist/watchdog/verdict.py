"""Who holds the others up: judged from what every worker reported last."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.watchdog.report import Report, State

#: How long who has failed or gone is waited for. The others may be about to fail by themselves,
#: with an error that says more, or to be ended by a launcher.
GRACE_SECONDS = 10.0
#: Longest time without a sign of life; a thread that only reports is never that busy.
SILENCE_SECONDS = 30.0

#: Longest time for the first steps of a task on GPUs. TensorFlow's wheel has no machine code for
#: GPUs newer than it: the driver compiles every kernel, which TensorFlow says can take 30 minutes.
COMPILE_SECONDS = 3600.0


def verdict(reports: Sequence[Report], seconds: float) -> str | None:
    """Returns why those at work can only wait, or None while they may still go on.

    Args:
        reports: One for each worker, in any order.
        seconds: For which nobody may have passed a place.
    """
    call = max((r.num_calls for r in reports if r.state is State.AT_WORK), default=None)
    if call is None:
        return None
    reports = sorted(reports, key=lambda r: r.progress)
    awaited = [r for r in reports if r.state is State.AT_WORK or r.num_calls < call]
    reason = (
        _failed([r for r in reports if r.num_calls == call], min(seconds, GRACE_SECONDS))
        or _gone(awaited, reports[-1], min(seconds, GRACE_SECONDS))
        or _silent(awaited, reports[-1], min(seconds, SILENCE_SECONDS))
        or _stuck(awaited, reports[-1], seconds)
    )
    return reason and "\n".join([reason, *map(_line, sorted(reports, key=lambda r: r.rank))])


def may_explain(reports: Sequence[Report], rank: int) -> bool:
    """Tells whether an error of a rank may come from another worker's end."""
    call = max((r.num_calls for r in reports if r.rank == rank), default=0)
    return any(
        r.state is State.FAILED or (r.missed and (r.state is State.AT_WORK or r.num_calls < call))
        for r in reports
        if r.rank != rank
    )


def _failed(reports: Sequence[Report], grace: float) -> str | None:
    for report in reports:
        if report.state is State.FAILED and report.idle >= grace:
            return f"{report} failed: {report.error}"
        if report.state is State.INTERRUPTED and report.idle >= grace:
            return f"{report} was interrupted."
    return None


def _gone(awaited: Sequence[Report], first: Report, grace: float) -> str | None:
    for report in awaited:
        if not report.connected and report.silent >= grace:
            if report.state is State.ENDED:
                return f"{report} has ended. {_reached(report, first)}"
            return f"{report} died: its connection closed without a word. {_reached(report, first)}"
    return None


def _silent(awaited: Sequence[Report], first: Report, limit: float) -> str | None:
    for report in awaited:
        if report.connected and report.state is not State.UNHEARD and report.silent >= limit:
            return (
                f"{report} has given no sign of life for {report.silent:.0f} s: it was stopped, or "
                f"the network to it broke. {_reached(report, first)}"
            )
    return None


def _stuck(awaited: Sequence[Report], first: Report, seconds: float) -> str | None:
    """Who is alive, but keeps the others waiting; of who is missed, the others judge in time."""
    if any(r.compiling for r in awaited):
        seconds = max(seconds, COMPILE_SECONDS)
    if len(awaited) < 2 or min(r.idle for r in awaited) < seconds:
        return None
    if any(r.missed for r in awaited):
        return None
    for report in awaited:
        if report.state is State.UNHEARD:
            waited = f"the others wait for {seconds:.0f} s"
            return f"rank {report.rank} was never heard of, and {waited}."
        if report.progress < first.progress:
            held_up = f"is alive, but has held up the others for {seconds:.0f} s"
            return f"{report} {held_up}. {_reached(report, first)}"
    return f"No rank has gone on from {first.place} for {seconds:.0f} s, though all are alive."


def _reached(report: Report, first: Report) -> str:
    """How far a worker came, and how far another; `first` is the furthest of all."""
    missed = f", not {first.place}" if report.progress < first.progress else ""
    return f"It reached {report.place}{missed}."


def _line(report: Report) -> str:
    if report.state is State.UNHEARD:
        return f"  rank {report.rank}: {report.state}"
    state = report.state if report.connected else f"{report.state} when its connection closed"
    return (
        f"  {report}: {state}; reached {report.place} {report.idle:.0f} s ago; "
        f"last sign of life {report.silent:.0f} s ago"
    )
