from __future__ import annotations

from typing import Any

import pytest

from tfdist.watchdog.report import Report, State
from tfdist.watchdog.verdict import may_explain, verdict

SECONDS = 100.0


def report(rank: int, **known: Any) -> Report:
    """A worker that is busy at step 5 of its first call."""
    busy = {
        "host": f"host{rank}",
        "pid": 70 + rank,
        "num_calls": 1,
        "num_passed": 5,
        "place": "step 5",
    }
    return Report(rank=rank, **busy | {"state": State.AT_WORK, "idle": 1, "silent": 0} | known)


BEHIND = {"num_passed": 4, "place": "step 4"}


@pytest.mark.parametrize(
    "other",
    [
        report(1),
        report(1, idle=99),
        report(1, idle=2 * SECONDS),  # rank 0 has just gone on: it was let
        report(1, silent=20),
        report(1, state=State.ENDED, connected=False, silent=200),
        report(1, state=State.OUTSIDE, connected=False, silent=200),  # died, but was done
        report(1, state=State.OUTSIDE, idle=200),
        report(1, state=State.FAILED, idle=2),  # rank 0 may be about to tell the same
        report(1, connected=False, silent=2),
        Report(rank=1),  # a firewall between the hosts
    ],
)
def test_all_may_go_on(other: Report) -> None:
    assert verdict([report(0), other], SECONDS) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (report(1, state=State.FAILED, error="ValueError: x", idle=11), "failed: ValueError: x"),
        (report(1, state=State.INTERRUPTED, idle=11), "was interrupted."),
        (
            report(1, connected=False, silent=11, **BEHIND),
            "died: its connection closed without a word. It reached step 4, not step 5.",
        ),
        (
            report(1, silent=31),
            "has given no sign of life for 31 s: it was stopped, or the network to it broke. "
            "It reached step 5.",
        ),
        (
            report(1, num_calls=0, state=State.ENDED, connected=False, silent=11, place="the end"),
            "has ended. It reached the end, not step 5.",
        ),
        (  # before it could say that it had begun the next call
            report(
                1, num_calls=0, state=State.OUTSIDE, connected=False, silent=11, place="the end"
            ),
            "died: its connection closed without a word. It reached the end, not step 5.",
        ),
    ],
)
def test_one_will_not_come(other: Report, reason: str) -> None:
    found = verdict([other, report(0)], SECONDS)
    assert found is not None
    first, *table = found.splitlines()
    assert first == f"rank 1 on host1 (pid 71) {reason}"
    assert table[0] == (
        "  rank 0 on host0 (pid 70): at work; reached step 5 1 s ago; last sign of life 0 s ago"
    )
    assert table[1].startswith("  rank 1 on host1 (pid 71): ")


def test_who_holds_up_the_others_is_named() -> None:
    reports = [report(0, idle=101), report(1, idle=102, **BEHIND), report(2, idle=101)]
    found = verdict(reports, SECONDS)
    assert found is not None
    assert found.startswith(
        "rank 1 on host1 (pid 71) is alive, but has held up the others for 100 s. "
        "It reached step 4, not step 5.\n"
    )


def test_nobody_moves() -> None:
    found = verdict([report(0, idle=101), report(1, idle=102)], SECONDS)
    assert found is not None
    assert found.startswith("No rank has gone on from step 5 for 100 s, though all are alive.\n")


@pytest.mark.parametrize("missed", [{"connected": False}, {}])
def test_who_is_missed_is_not_called_alive(missed: dict[str, bool]) -> None:
    """It stopped a moment after the mark at which the others wait since."""
    other = report(1, idle=6, silent=5.5, **missed)
    assert verdict([report(0, idle=6), other], 6.0) is None


def test_who_never_came_is_not_called_alive() -> None:
    found = verdict([report(0, idle=101), Report(rank=1)], SECONDS)
    assert found is not None
    assert found.startswith("rank 1 was never heard of, and the others wait for 100 s.\n")


def test_who_works_alone_may_take_its_time() -> None:
    assert verdict([report(0, idle=500), report(1, state=State.OUTSIDE)], SECONDS) is None


def test_errors_of_a_call_that_is_over_end_nobody() -> None:
    failed = report(1, state=State.FAILED, idle=50)
    assert verdict([report(0, num_calls=2), failed], SECONDS) is None


def test_a_short_time_shortens_all_others() -> None:
    assert verdict([report(0), report(1, silent=3)], 4.0) is None
    assert "no sign of life" in (verdict([report(0), report(1, silent=5)], 4.0) or "")
    assert "died" in (verdict([report(0), report(1, connected=False, silent=5)], 4.0) or "")


@pytest.mark.parametrize(
    ("other", "does"),
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
def test_what_may_be_behind_an_error(other: Report, does: bool) -> None:
    assert may_explain([report(0, silent=10), other], rank=0) is does
