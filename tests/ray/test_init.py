"""What `ray.init` changes in its process."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from tfdist.errors import Preempted
from tfdist.loops import interrupts


def test_handler_of_ray_does_not_end_a_training_before_it_saves() -> None:
    with pytest.raises(ValueError, match="no port"):
        ray.init(address="no port")  # sets the handler before it reads the address
    before = signal.getsignal(signal.SIGTERM)
    assert before is not signal.SIG_DFL
    with pytest.raises(Preempted), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
