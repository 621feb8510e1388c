"""Undoes what Ray leaves behind in the test process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _handler_of_sigterm() -> Iterator[None]:
    """Restores the handler of SIGTERM, which `ray.init` and Ray's `Cluster` replace for good.

    With theirs, a training that a later test preempts would not save, but exit or be killed.
    """
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
