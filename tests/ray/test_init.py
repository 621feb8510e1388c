"""What `ray.init` changes in its process, and when it is not called."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from tfdist.errors import LaunchError, Preempted
from tfdist.loops import interrupts
from tfdist.ray.placement import connect


def test_unreachable_cluster_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray waits for minutes"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(LaunchError, match=r"no answer from 127\.0\.0\.1:1 .* Check RAY_ADDRESS"):
        connect()


def test_handler_of_ray_does_not_end_a_training_before_it_saves() -> None:
    with pytest.raises(ValueError, match="no port"):
        ray.init(address="no port")  # sets the handler before it reads the address
    before = signal.getsignal(signal.SIGTERM)
    assert before is not signal.SIG_DFL
    with pytest.raises(Preempted), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
