"""The watchdog's clock, which excludes the time for which a process is suspended."""

from __future__ import annotations

import pytest

from tfdist.cluster.watchdog import status as clock


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
