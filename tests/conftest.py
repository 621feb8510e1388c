"""Set-up of every test process: logical CPU devices, test selection, leftover processes.

Also the fixtures that tests of several folders share.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests import selection, start_tensorflow_when_imported

if TYPE_CHECKING:
    from tests.support.buckets import Proxy

# mpirun and horovodrun may be in the virtual environment, which is not always activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# A shell starts background jobs with SIGINT ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
start_tensorflow_when_imported()
# Tests compare with plain Keras themselves; see tests/loops/test_self_check.py.
os.environ.setdefault("TFDIST_VERIFY", "off")

# Hypothesis derives its examples from each test, so that every run tries the same ones. There is
# no deadline, because a busy machine must not fail a test.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

#: Environment variable that all processes of a test run inherit, to find leftover ones.
_RUN = "TFDIST_TEST_RUN"
_OWNS_RUN = pytest.StashKey[bool]()
_LEFT = pytest.StashKey[list[str]]()
#: Memory for one test process and its three or four small subprocesses.
_GIB_PER_PROCESS = 4.0


@pytest.hookimpl(optionalhook=True)  # -p no:xdist
def pytest_xdist_auto_num_workers() -> int:
    """Returns the number of processes for `-n auto`: one per core, as far as memory allows."""
    memory = min(psutil.virtual_memory().available, _container_limit("memory.max"))
    cores = min(len(os.sched_getaffinity(0)), _container_limit("cpu.max"))
    return max(1, int(min(cores, memory / 2**30 / _GIB_PER_PROCESS)))


def _container_limit(name: str) -> float:
    """Returns a limit of this control group: bytes for `memory.max`, cores for `cpu.max`."""
    file = Path("/sys/fs/cgroup") / name
    limit, *period = file.read_text().split() if file.exists() else ["max"]
    return math.inf if limit == "max" else float(limit) / float(period[0] if period else 1)


def pytest_configure(config: pytest.Config) -> None:
    # xdist workers, and a pytest that a test starts, belong to the outer run.
    config.stash[_OWNS_RUN] = _RUN not in os.environ
    os.environ.setdefault(_RUN, uuid.uuid4().hex)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without tests that `-m quick` would select, without importing them."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return None if selection.may_be_quick(collection_path) else True
    return None


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Sets seeds, so that weights and data without one are the same in any order of the tests."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := selection.mark_of(item)) is not None:
            item.add_marker(mark)


def pytest_collection_finish() -> None:
    if "tensorflow" in sys.modules:
        import keras  # noqa: F401

        # Otherwise every garbage collection traverses the objects of TensorFlow and Keras: 0.25 s.
        gc.freeze()


@pytest.hookimpl(trylast=True)  # after xdist has stopped its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if a process that a test started is still alive."""
    if not session.config.stash[_OWNS_RUN]:
        return
    left = [process for process in psutil.process_iter(["cmdline"]) if _is_of_this_run(process)]
    _, left = psutil.wait_procs(left, timeout=60)
    session.config.stash[_LEFT] = [f"{p.pid}: {' '.join(p.info['cmdline'])[:200]}" for p in left]
    for process in left:
        process.kill()
    if left and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("processes that tests left running", red=True)
        terminalreporter.write_line("\n".join(left))


def _is_of_this_run(process: psutil.Process) -> bool:
    own = psutil.Process()
    try:
        of_run = process.environ().get(_RUN) == os.environ[_RUN]
        # Python's helper processes, such as the resource tracker, end with this process.
        helper = any("from multiprocessing" in argument for argument in process.cmdline())
        return of_run and not helper and process != own and process not in own.parents()
    except psutil.Error:  # ended in the meantime, or belongs to another user
        return False


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server."""
    from tests.support import buckets

    buckets.require_s3()
    with buckets.s3_server() as address:
        yield address


@pytest.fixture
def proxy(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the S3 server, as this process's endpoint, and a new cache folder."""
    from tests.support import buckets

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with buckets.through_proxy(s3_server, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: str, proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """The URL of a bucket of this test."""
    from tests.support import buckets

    name = "".join(c for c in request.node.name if c.isalnum()).lower()[:60]
    buckets.create_bucket(s3_server, name)
    return f"s3://{name}"
