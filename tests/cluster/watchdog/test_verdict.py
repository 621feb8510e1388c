"""What the watchdog concludes from what it hears, its clock, and when it runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tfdist.cluster.watchdog import status as clock
from tfdist.cluster.watchdog.status import Report, State
from tfdist.cluster.watchdog.verdict import _ranges, in_trouble, table, verdict, verdict_on_rank_0
from tfdist.cluster.watchdog.watchdog import Watchdog
from tfdist.errors import ConfigurationError
from tfdist.groups.base import LocalGroup

SECONDS = 100.0


def report(rank: int, **known: Any) -> Report:
    """Returns the report of a worker that computes step 5 of its first call."""
    busy = {
        "host": f"host{rank}",
        "pid": 70 + rank,
        "num_calls": 1,
        "num_passed": 5,
        "place": "step 5",
    }
    return Report(rank=rank, **busy | {"state": State.RUNNING, "idle": 1, "silent": 0} | known)


BEHIND = {"num_passed": 4, "place": "step 4"}


@pytest.mark.parametrize(
    "other",
    [
        report(1),
        report(1, idle=99),
        report(1, idle=2 * SECONDS),  # rank 0 has just continued, so it does not wait
        report(1, silent=20),
        report(1, state=State.ENDED, connected=False, silent=200),
        report(1, state=State.OUTSIDE, connected=False, silent=200),  # died after its last call
        report(1, state=State.OUTSIDE, idle=200),
        report(1, state=State.FAILED, idle=2),  # rank 0 may be about to report the same error
        report(1, connected=False, silent=2),
        Report(rank=1),  # a firewall between the hosts
    ],
)
def test_no_verdict_while_all_workers_are_well(other: Report) -> None:
    assert verdict([report(0), other], SECONDS) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (report(1, state=State.FAILED, error="ValueError: x", idle=11), "failed: ValueError: x"),
        (report(1, state=State.INTERRUPTED, idle=11), "was interrupted."),
        (
            report(1, connected=False, silent=11, **BEHIND),
            "died: its connection closed unexpectedly. It reached step 4, not step 5.",
        ),
        (
            report(1, silent=31),
            "has not responded for 31 s: it is suspended, or the network to it is "
            "interrupted. It reached step 5.",
        ),
        (
            report(1, num_calls=0, state=State.ENDED, connected=False, silent=11, place="the end"),
            "has exited. It reached the end, not step 5.",
        ),
        (  # before it reported the beginning of the next call
            report(
                1, num_calls=0, state=State.OUTSIDE, connected=False, silent=11, place="the end"
            ),
            "died: its connection closed unexpectedly. It reached the end, not step 5.",
        ),
    ],
)
def test_verdict_names_the_lost_worker(other: Report, reason: str) -> None:
    result = verdict([other, report(0)], SECONDS)
    assert result is not None
    first, *table = result.splitlines()
    assert first == f"rank 1 on host1 (pid 71) {reason}"
    assert table[0] == (
        "  rank 0 on host0 (pid 70): running; reached step 5 1 s ago; last report 0 s ago"
    )
    assert table[1].startswith("  rank 1 on host1 (pid 71): ")


def test_verdict_names_the_worker_that_holds_up_the_others() -> None:
    reports = [report(0, idle=101), report(1, idle=102, **BEHIND), report(2, idle=101)]
    result = verdict(reports, SECONDS)
    assert result is not None
    assert result.startswith(
        "rank 1 on host1 (pid 71) is alive, but has kept the others waiting for 100 s. "
        "It reached step 4, not step 5.\n"
    )


def test_verdict_if_no_worker_makes_progress() -> None:
    result = verdict([report(0, idle=101), report(1, idle=102)], SECONDS)
    assert result is not None
    assert result.startswith(
        "No rank has made progress beyond step 5 for 100 s, although all are alive.\n"
    )


@pytest.mark.parametrize("missed", [{"connected": False}, {}])
def test_silent_worker_is_not_reported_as_alive(missed: dict[str, bool]) -> None:
    """It stopped just after the point at which the others have been waiting since."""
    other = report(1, idle=6, silent=5.5, **missed)
    assert verdict([report(0, idle=6), other], 6.0) is None


def test_worker_that_never_reported_is_named() -> None:
    result = verdict([report(0, idle=101), Report(rank=1)], SECONDS)
    assert result is not None
    assert result.startswith("rank 1 never reported, and the others have waited for 100 s.\n")


def test_no_verdict_while_a_worker_is_outside_of_a_call() -> None:
    assert verdict([report(0, idle=500), report(1, state=State.OUTSIDE)], SECONDS) is None


def test_errors_of_completed_calls_are_ignored() -> None:
    failed = report(1, state=State.FAILED, idle=50)
    assert verdict([report(0, num_calls=2), failed], SECONDS) is None


def test_short_time_limit_shortens_all_others() -> None:
    assert verdict([report(0), report(1, silent=3)], 4.0) is None
    assert "has not responded" in (verdict([report(0), report(1, silent=5)], 4.0) or "")
    assert "died" in (verdict([report(0), report(1, connected=False, silent=5)], 4.0) or "")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (report(1), False),
        (report(1, connected=False), True),
        (report(1, silent=10), True),
        (report(1, state=State.FAILED), True),
        (report(1, state=State.OUTSIDE, connected=False), False),
        (report(1, state=State.OUTSIDE, connected=False, num_calls=0), True),
        (report(1, state=State.ENDED, connected=False, num_calls=0), True),
    ],
)
def test_workers_that_may_have_caused_an_error(other: Report, expected: bool) -> None:
    own = [report(0)]
    assert (1 in in_trouble([*own, other], size=2)) is expected


def many(number: int, **known: Any) -> list[Report]:
    """Returns reports of workers at step 5, eight on each host."""
    return [report(rank, host=f"node{rank // 8}", **known) for rank in range(number)]


def test_hundred_failures_among_thousands_give_one_short_verdict() -> None:
    reports = many(4096)
    for rank in range(1000, 1100):
        reports[rank] = report(rank, host=f"node{rank // 8}", connected=False, silent=11, **BEHIND)
    result = str(verdict(reports, SECONDS))
    first, host, *_, usual = lines = result.splitlines()
    assert first.startswith("rank 1000 on node125 (pid 1070) died: its connection closed")
    assert first.endswith("99 more died, on 13 hosts in total.")
    assert usual == "  3996 ranks on 500 hosts: running; reached step 5"
    assert host == ("  node125: rank 1000-1007: running when its connection closed; reached step 4")
    assert len(lines) <= 40


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1, 2, 3, 7], "1-3, 7"),
        (range(0, 12, 2), "0, 2, 4, 6, 8, 10"),
        (range(0, 14, 2), "0, 2, 4, 6, 8, 10, ..."),
    ],
)
def test_ranks_are_listed_as_at_most_six_ranges(ranks: Sequence[int], text: str) -> None:
    assert _ranges(ranks) == text


@pytest.mark.parametrize("number", [33, 500, 4096])
def test_verdict_has_at_most_forty_lines(number: int) -> None:
    reports = [
        report(rank, host=f"node{rank}", place=f"step {rank}", silent=31) for rank in range(number)
    ]
    assert len(str(verdict(reports, SECONDS)).splitlines()) <= 40
    assert len(table(reports)) == 1
    assert f"  and {number - 31} more ranks on " in str(verdict(reports, SECONDS))


def test_silence_is_reported_within_half_a_minute_at_any_size() -> None:
    reports = many(4096)
    reports[7] = report(7, silent=25)  # rank 0 checks again after up to five seconds
    assert "rank 7 on host7 (pid 77) has not responded" in str(verdict(reports, SECONDS))


@pytest.mark.parametrize(
    ("rank_0", "reason"),
    [
        (report(0), None),
        (report(0, idle=1000), None),  # rank 0 decides for itself
        (report(0, connected=False, silent=11), "died: its connection closed unexpectedly."),
        (report(0, silent=31), "has not responded for 31 s"),
        (report(0, state=State.FAILED, error="ValueError: x", idle=11), "failed: ValueError: x"),
        (report(0, state=State.OUTSIDE, connected=False, silent=200), None),
    ],
)
def test_rank_0_is_judged_by_the_others(rank_0: Report, reason: str | None) -> None:
    result = verdict_on_rank_0(rank_0, report(1), SECONDS, 2)
    assert (result is None) == (reason is None)
    assert (reason or "") in (result or "")


def test_suspended_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    watch = clock.Clock(tick_seconds=1.0)
    now += 20.0
    watch.tick()  # the first tick starts the clock
    begin = watch.now()
    now += 1.0
    watch.tick()
    assert watch.now() - begin == 1.0
    now += 600.0
    assert watch.now() - begin == 2.0  # read by another thread before the tick
    watch.tick()
    assert watch.now() - begin == 2.0
    now += 0.5
    assert watch.now() - begin == 2.5


def test_one_worker_is_not_watched() -> None:
    watchdog = Watchdog(LocalGroup(), 5.0)
    with watchdog.watching("fit"):
        watchdog.passed("step 1")
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_negative_time_limit_raises() -> None:
    with pytest.raises(ConfigurationError, match="watchdog_seconds=-1"):
        Watchdog(LocalGroup(), -1)
