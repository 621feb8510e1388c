"""When the watchdog runs, and its time limit."""

from __future__ import annotations

import threading

import pytest

from tfdist.cluster.watchdog.watchdog import Watchdog
from tfdist.errors import ConfigurationError
from tfdist.groups.base import LocalGroup


def test_one_worker_is_not_watched() -> None:
    watchdog = Watchdog(LocalGroup(), 5.0)
    with watchdog.watching("fit"):
        watchdog.passed("step 1")
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_negative_time_limit_raises() -> None:
    with pytest.raises(ConfigurationError, match="watchdog_seconds=-1"):
        Watchdog(LocalGroup(), -1)
