"""Finds the worker that the others wait for, from the latest report of every worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tfdist.cluster.deadline import COMPILE_SECONDS
from tfdist.cluster.watchdog.status import (
    HEARTBEAT_SECONDS,
    Report,
    State,
    heartbeat_seconds,
    missed_seconds,
)

#: Time between a failure or a lost connection and the verdict. Meanwhile the other workers may
#: raise a more informative error, or a launcher may terminate them.
GRACE_SECONDS = 10.0
#: Time within which a worker that does not respond is named. Its reporting thread is never busy for
#: that long.
SILENCE_SECONDS = 30.0


#: Maximum number of lines in the table of a verdict.
_MAX_LINES = 32

#: The first line of a verdict, and the failed workers.
_Reason = tuple[str, list[Report]]


def verdict(reports: Sequence[Report], seconds: float) -> str | None:
    """Returns why the workers cannot continue, or None if they may.

    Takes O(workers) time; the text has at most 40 lines.
    """
    call = max((r.num_calls for r in reports if r.state is State.RUNNING), default=None)
    if call is None:
        return None
    reports = sorted(reports, key=lambda r: r.progress)
    awaited = [r for r in reports if r.state is State.RUNNING or r.num_calls < call]
    grace = min(seconds, GRACE_SECONDS)
    reason = (
        _failed([r for r in reports if r.num_calls == call], grace)
        or _gone(awaited, reports[-1], grace)
        or _silent(awaited, reports[-1], silence_limit(seconds, len(reports)))
        or _stuck(awaited, reports[-1], seconds, missed_seconds(len(reports)))
    )
    return _with_table(reason, reports)


def verdict_on_rank_0(rank_0: Report, own: Report, seconds: float, size: int) -> str | None:
    """Returns why this worker cannot continue because of rank 0, or None if it may.

    Rank 0 evaluates all workers and sends its verdict. The others only check rank 0.
    """
    if own.state is not State.RUNNING:
        return None
    grace = min(seconds, GRACE_SECONDS)
    awaited = rank_0.state is State.RUNNING or rank_0.num_calls < own.num_calls
    awaited_reports = [rank_0] if awaited else []
    first = max(rank_0, own, key=lambda r: r.progress)
    reason = (
        _failed([rank_0] if rank_0.num_calls == own.num_calls else [], grace)
        or _gone(awaited_reports, first, grace)
        or _silent(awaited_reports, first, silence_limit(seconds, size))
    )
    return _with_table(reason, [rank_0, own])


def _with_table(reason: _Reason | None, reports: Sequence[Report]) -> str | None:
    if reason is None:
        return None
    text, culprits = reason
    return "\n".join([text, *table(reports, {report.rank for report in culprits})])


def silence_limit(seconds: float, size: int) -> float:
    """Returns the time without a report after which to name a worker within `SILENCE_SECONDS`."""
    return min(seconds, SILENCE_SECONDS - HEARTBEAT_SECONDS - heartbeat_seconds(size))


def in_trouble(reports: Iterable[Report], size: int) -> list[int]:
    """Returns the ranks whose failure may have caused an error of another rank in this call."""
    reports = list(reports)
    call = max((r.num_calls for r in reports), default=0)
    limit = missed_seconds(size)
    return [
        r.rank
        for r in reports
        if r.state is State.FAILED
        or (r.missed(limit) and (r.state is State.RUNNING or r.num_calls < call))
    ]


def _failed(reports: Sequence[Report], grace: float) -> _Reason | None:
    failed = [r for r in reports if r.state is State.FAILED]
    interrupted = [r for r in reports if r.state is State.INTERRUPTED]
    for report in reports:
        if report.state is State.FAILED and report.idle >= grace:
            return f"{report} failed: {report.error}{_others(failed, 'failed')}", failed
        if report.state is State.INTERRUPTED and report.idle >= grace:
            text = f"{report} was interrupted.{_others(interrupted, 'were interrupted')}"
            return text, interrupted
    return None


def _gone(awaited: Sequence[Report], first: Report, grace: float) -> _Reason | None:
    gone = [r for r in awaited if not r.connected]
    for report in gone:
        if report.silent >= grace:
            if report.state is State.ENDED:
                return f"{report} has exited. {_reached(report, first)}", gone
            return (
                f"{report} died: its connection closed unexpectedly. {_reached(report, first)}"
                f"{_others(gone, 'died')}"
            ), gone
    return None


def _silent(awaited: Sequence[Report], first: Report, limit: float) -> _Reason | None:
    silent = [r for r in awaited if r.connected and r.state is not State.UNKNOWN]
    silent = [r for r in silent if r.silent >= limit]
    for report in silent:
        return (
            f"{report} has not responded for {report.silent:.0f} s: it is suspended, or "
            f"the network to it is interrupted. {_reached(report, first)}"
            f"{_others(silent, 'have not responded')}"
        ), silent
    return None


def _stuck(
    awaited: Sequence[Report], first: Report, seconds: float, missed_after: float
) -> _Reason | None:
    """Names a worker that responds, but makes no progress while the others wait."""
    if any(r.compiling for r in awaited):
        seconds = max(seconds, COMPILE_SECONDS)
    if len(awaited) < 2 or min(r.idle for r in awaited) < seconds:
        return None
    if any(r.missed(missed_after) for r in awaited):  # `_gone` or `_silent` will name it soon
        return None
    behind = [r for r in awaited if r.progress < first.progress]
    for report in awaited:
        if report.state is State.UNKNOWN:
            return (
                f"rank {report.rank} never reported, and the others have waited for "
                f"{seconds:.0f} s."
            ), [report]
        if report.progress < first.progress:
            return (
                f"{report} is alive, but has kept the others waiting for {seconds:.0f} s. "
                f"{_reached(report, first)}{_others(behind, 'are behind')}"
            ), behind
    text = (
        f"No rank has made progress beyond {first.place} for {seconds:.0f} s, although all are "
        "alive."
    )
    return text, []


def _others(reports: Sequence[Report], what: str) -> str:
    others, hosts = len(reports) - 1, {r.host for r in reports}
    if others < 1:
        return ""
    return f" {others} more {what}, on {len(hosts)} host{'s' * (len(hosts) > 1)} in total."


def _reached(report: Report, first: Report) -> str:
    """Describes the progress of a worker, compared with the furthest worker `first`."""
    missed = f", not {first.place}" if report.progress < first.progress else ""
    return f"It reached {report.place}{missed}."


def table(reports: Sequence[Report], culprits: Collection[int] = ()) -> list[str]:
    """Returns a line for each worker.

    For many workers, it returns a line for each host with failed workers and summarizes the others.
    """
    reports = sorted(reports, key=lambda r: r.rank)
    if len(reports) <= _MAX_LINES:
        return [f"  {_line(report)}" for report in reports]
    by_host: dict[tuple[str, str], list[int]] = {}
    by_state: dict[str, list[Report]] = {}
    for report in reports:
        if report.rank in culprits:
            by_host.setdefault((report.host, _condition(report)), []).append(report.rank)
        else:
            by_state.setdefault(_state(report), []).append(report)
    others = [f"  {_summary(state, members)}" for state, members in by_state.items()]
    groups, max_groups = list(by_host.items()), _MAX_LINES - len(others) - 1
    lines = [
        f"  {host}: rank {_ranges(ranks)}: {what}" for (host, what), ranks in groups[:max_groups]
    ]
    if remaining := groups[max_groups:]:
        hosts = {host for (host, _), _ in remaining}
        number = sum(len(ranks) for _, ranks in remaining)
        lines.append(f"  and {number} more ranks on {len(hosts)} hosts")
    return [*lines, *others]


def _summary(state: str, reports: Sequence[Report]) -> str:
    """Summarizes many workers with the same state in one line."""
    hosts = len({report.host for report in reports})
    first, last = min(reports, key=_progress), max(reports, key=_progress)
    reached = first.place if first.place == last.place else f"{first.place} to {last.place}"
    return f"{len(reports)} ranks on {hosts} hosts: {state}; reached {reached}"


def _progress(report: Report) -> tuple[int, int]:
    return report.progress


def _state(report: Report) -> str:
    closed = "" if report.connected else " when its connection closed"
    return f"{report.state}{closed}"


def _condition(report: Report) -> str:
    """Returns the state and the last mark of a failed worker, for grouping."""
    if report.state is State.UNKNOWN:
        return str(report.state)
    return f"{_state(report)}; reached {report.place}"


def _line(report: Report) -> str:
    if report.state is State.UNKNOWN:
        return f"rank {report.rank}: {report.state}"
    return (
        f"{report}: {_condition(report)} {report.idle:.0f} s ago; "
        f"last report {report.silent:.0f} s ago"
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Formats sorted ranks as at most six ranges: 1-3, 7."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges[:6]]
    return ", ".join([*texts, "..."] if len(ranges) > 6 else texts)
