"""What every test needs: CPU devices for replicas to be on, and this environment's programs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

from tests import start_tensorflow

# mpirun and horovodrun may be the environment's own, which need not be activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
start_tensorflow()

# A busy machine fails no test, and the same tests pass every time: what is tried follows from each.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
