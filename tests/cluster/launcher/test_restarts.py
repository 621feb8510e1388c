"""Restarts of workers: what restarts, how often, and with how many workers."""

from __future__ import annotations

import functools
import signal
import sys
from pathlib import Path

import pytest

from tests.support.commands import wait_for
from tests.support.starting import ENVIRON, SECONDS, command, launch, piped, program
from tfdist import launch as launching
from tfdist.cluster.launcher.options import parse
from tfdist.cluster.launcher.processes import Children
from tfdist.cluster.launcher.restarts import Elastic, Failure, Restarts, run_with_restarts
from tfdist.errors import REQUEUE

FAILED, PREEMPTED = Failure("1", 9, ""), Failure("0", REQUEUE, "")
#: The failure of a rank that was waiting for another one.
WAITED = Failure("0", 75, "error: rank 1 on host (pid 7) died: its connection closed.")


@pytest.mark.parametrize(
    ("ends", "last"),
    [
        ([FAILED] * 3 + [None], None),
        ([FAILED] * 4, FAILED),
        ([PREEMPTED] * 9 + [FAILED] * 3 + [None], None),
        ([FAILED] * 3 + [PREEMPTED] * 9 + [FAILED], FAILED),
    ],
)
def test_restart_limit_excludes_preemptions(
    ends: list[Failure | None], last: Failure | None
) -> None:
    restarts = Restarts(3)
    attempts = iter(ends)
    assert run_with_restarts(lambda: next(attempts), restarts) == last
    assert next(attempts, "all made") == "all made"
    assert (restarts.failures, restarts.preemptions) == (3, ends.count(PREEMPTED))


def test_restarted_training_resumes() -> None:
    (*_, flag, value) = parse(["--epochs", "2"]).resuming.command
    assert (flag, value) == ("--resume", "auto")
    for flags in (["--resume=never"], ["--", "true"]):
        assert parse(flags).resuming == parse(flags)


def test_preemption_without_restarts_is_returned() -> None:
    assert run_with_restarts(lambda: PREEMPTED, Restarts(0)) == PREEMPTED


@pytest.mark.parametrize("failure", [FAILED, WAITED])
def test_slot_that_fails_twice_is_excluded_and_retried(failure: Failure) -> None:
    elastic = Elastic(2, 3, retry_seconds=8)
    counted = [elastic.note(failure)]
    assert (elastic.slots, elastic.seconds) == ([0, 1, 2], None)
    counted.append(elastic.note(failure))
    assert (elastic.slots, elastic.seconds) == ([0, 2], 8)
    counted.append(elastic.note(PREEMPTED))  # after 8 seconds
    assert (elastic.slots, elastic.seconds) == ([0, 1, 2], None)
    counted.append(elastic.note(failure))
    assert (elastic.slots, elastic.seconds) == ([0, 2], 16)
    assert counted == [True, True, True, False]
    for _ in range(3):  # slot 2 fails, but at least two workers must remain
        assert elastic.note(failure)
        assert elastic.slots == [0, 2]


BODY = """
runs = pathlib.Path(f"runs {rank} {len(json.loads(os.environ['TF_CONFIG'])['cluster']['worker'])}")
with runs.open("a") as file: print(os.environ["TF_CONFIG"], file=file)
"""


def test_restarted_group_uses_new_ports(tmp_path: Path) -> None:
    body = f"""
{BODY}
other = pathlib.Path("runs 0 2")
while rank == 1:  # fails once the other worker has started as often
    if other.exists() and len(other.read_text().splitlines()) == len(runs.read_text().splitlines()):
        raise SystemExit(4)
    time.sleep(0.05)
time.sleep(600)
"""
    path = program(tmp_path, body)
    done = launch("--max-restarts", "2", "--", sys.executable, path, cwd=tmp_path)
    assert done.returncode == 4
    assert "restart 2 of 2 after failures, 0 after preemptions." in done.stderr
    for rank in range(2):
        assert len(set((tmp_path / f"runs {rank} 2").read_text().splitlines())) == 3


def test_failing_slot_is_excluded_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The GPU of slot 1 is broken until the run has continued without it.

    It is retried when one worker has run: after a fixed time, a slow machine may have started none.
    """
    body = f"""
{BODY}
if os.environ["CUDA_VISIBLE_DEVICES"] == "1" and not pathlib.Path("mended").exists():
    raise SystemExit(4)
if not pathlib.Path("runs 0 1").exists():
    time.sleep(600)
if not pathlib.Path("mended").exists():
    pathlib.Path("mended").touch()
    time.sleep(600)
"""
    monkeypatch.setattr(launching, "Elastic", lambda *bounds: Elastic(*bounds, retry_seconds=0.1))
    run = functools.partialmethod(Children.run, should_preempt=(tmp_path / "mended").exists)
    monkeypatch.setattr(Children, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ENVIRON["PYTHONPATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # tests see no GPU to assign
    flags = ["--elastic", "1:2", "--max-restarts", "2", "--gpus-per-worker", "1"]
    path = program(tmp_path, body)
    assert launching.launch(parse([*flags, "--", sys.executable, path])) is None
    assert "restart 2 of 2 after failures, 1 after preemptions." in capfd.readouterr().err
    assert len((tmp_path / "runs 0 1").read_text().splitlines()) == 1
    assert len((tmp_path / "runs 1 2").read_text().splitlines()) == 3


SAVES = f"""
{BODY}
def save(number, frame):
    time.sleep(0.5 * rank)  # the launcher waits for all
    pathlib.Path(f"saved {{rank}}").touch()
    raise SystemExit({REQUEUE})
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, save)
pathlib.Path(f"ready {{rank}}").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_preempted_launcher_lets_workers_save(tmp_path: Path, number: signal.Signals) -> None:
    line = command("--max-restarts", "2", "--", sys.executable, program(tmp_path, SAVES))
    with piped(*line, cwd=tmp_path) as process:
        wait_for(lambda: len(list(tmp_path.glob("ready *"))) == 2)
        for _ in range(2):  # to the job and to its step
            process.send_signal(number)
        assert process.wait(SECONDS) == REQUEUE
    assert len(list(tmp_path.glob("saved *"))) == 2


def test_preempted_worker_lets_all_save_and_ends_the_launcher(tmp_path: Path) -> None:
    body = SAVES.replace("time.sleep(600)", "os.kill(os.getpid(), signal.SIGUSR1)")
    done = launch("--", sys.executable, program(tmp_path, body), cwd=tmp_path)
    assert done.returncode == REQUEUE
    assert "was preempted, and all workers stopped. Run the same command" in done.stderr
    assert len(list(tmp_path.glob("saved *"))) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--elastic", "2:1", "--max-restarts", "1"], "expected numbers of workers like 2:4"),
        (["--elastic", "1:2"], "--elastic needs --max-restarts"),
        (["--elastic", "1:2", "--max-restarts", "1", "--num-workers", "3"], "Remove --num-workers"),
        (["--elastic", "1:2", "--max-restarts", "1", "--via", "mpirun"], "works only for workers"),
        (["--max-restarts", "1", "--hosts", "a:1,b:1"], "restart the workers of other hosts"),
        (["--max-restarts", "1", "--print-k8s", "tfjob"], "the scheduler restart all workers"),
    ],
)
def test_unsupported_restart_options_raise(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launching.main([*flags, "--", "true"]) == 1
    assert message in capsys.readouterr().err
