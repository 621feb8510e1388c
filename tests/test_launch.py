"""The launch command as a user runs it, with workers that are plain Python programs."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.commands import wait_for
from tests.support.starting import (
    ENVIRON,
    SECONDS,
    command,
    launch,
    launch_program,
    piped,
    program,
    run,
    start,
    wait_for_line,
)
from tfdist.cluster.launcher.options import parse
from tfdist.errors import TERMINATED
from tfdist.launch import main, with_strategy

#: Starts a child in a new session, prints both process ids, and waits.
LINGERS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print("ids", os.getpid(), child.pid)
"""


def ids_of(process: subprocess.Popen[str], num_workers: int) -> list[int]:
    """Returns the process ids that the workers print; the workers keep running."""
    results: list[int] = []
    assert process.stdout is not None
    while len(results) < 2 * num_workers:
        words = process.stdout.readline().split()
        assert words, "the workers ended before they printed their process ids"
        if "ids" in words:
            results += [int(word) for word in words[-2:]]
    return results


def gone(ids: list[int]) -> bool:
    """Returns whether all processes end before a time-out."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(one) and _runs(one) for one in ids):
            return True
        time.sleep(0.05)
    return False


def _runs(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_output_lines_start_with_the_rank(tmp_path: Path) -> None:
    body = 'print("out", rank); print("err", rank, file=sys.stderr); print("end", end="")'
    done = launch_program(tmp_path, body, "--num-workers", "3")
    assert done.returncode == 0
    wanted = [line for rank in range(3) for line in (f"[{rank}] end", f"[{rank}] out {rank}")]
    assert sorted(done.stdout.splitlines()) == wanted
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] err {rank}" for rank in range(3)]


def test_workers_get_the_cluster(tmp_path: Path) -> None:
    body = """
from tfdist import cluster
me = cluster.exchange_addresses(cluster.discover())
print(me.source, me.rank, me.size, me.local_rank, me.local_size)
"""
    done = launch_program(tmp_path, body)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[0] TF_CONFIG 0 2 0 2", "[1] TF_CONFIG 1 2 1 2"]


def test_launcher_in_each_of_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    command = ["--num-workers", "2", "--", sys.executable, program(tmp_path, "")]
    assert main(command) == 1
    assert "PMI started 2 processes" in capsys.readouterr().err
    assert main(["--dry-run", *command]) == 0  # the launcher itself is not one of them


def test_first_failure_terminates_all_workers(tmp_path: Path) -> None:
    body = f"{LINGERS}\nif rank == 1: raise SystemExit(7)\ntime.sleep(600)"
    done = launch_program(tmp_path, body, "--num-workers", "3")
    assert done.returncode == 7
    assert "error: rank 1 was the first to fail, with exit code 7." in done.stderr
    words = " ".join(line for line in done.stdout.splitlines() if "ids" in line).split()
    assert gone([int(word) for word in words if word.isdecimal()])


def test_early_exit_is_reported_before_the_failure_it_caused(tmp_path: Path) -> None:
    body = """
import psutil
if rank == 0:  # fails after the launcher has seen that the other worker ended
    while not pathlib.Path("other").exists(): time.sleep(0.05)
    while psutil.pid_exists(int(pathlib.Path("other").read_text())): time.sleep(0.05)
    raise SystemExit(3)
pathlib.Path("own").write_text(str(os.getpid()))
pathlib.Path("own").rename("other")
"""
    done = launch("--", sys.executable, program(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 3
    assert (
        "error: rank 1 ended first, with exit code 0; then rank 0 failed, with exit" in done.stderr
    )


def test_early_exit_ends_workers_that_wait_for_all_others(tmp_path: Path) -> None:
    body = """
if rank == 1: raise SystemExit
from tfdist import cluster
cluster.exchange_addresses(cluster.discover())
"""
    done = launch_program(tmp_path, body, "--num-workers", "3")
    assert done.returncode == 1
    assert "error: rank 1 ended with exit code 0 before all workers had connected" in done.stderr
    # Under load, one of the others may not have begun to wait yet.
    assert re.search("and rank (0|2|0, 2) waited for it", done.stderr)


def test_output_ends_with_the_first_failures_traceback(tmp_path: Path) -> None:
    body = """
if rank == 0:
    time.sleep(600)
try:
    {}["first"]
except KeyError:
    raise ValueError("no such batch") from None
"""
    done = launch_program(tmp_path, body)
    assert done.returncode == 1
    end = done.stderr.partition("error: ")[2]
    assert end.startswith("rank 1 was the first to fail, with exit code 1:\nTraceback (most")
    assert end.endswith("ValueError: no such batch\n")


def test_reports_the_signal_that_killed_a_worker(tmp_path: Path) -> None:
    done = launch_program(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "--num-workers", "1")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 was the first to fail, with signal SIGKILL" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, TERMINATED),
        (signal.SIGUSR1, TERMINATED),  # and not 138, because nothing is saved
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
def test_no_process_and_no_file_outlives_the_launcher(
    number: int, code: int, tmp_path: Path
) -> None:
    path = program(tmp_path, f"{LINGERS}\ntime.sleep(600)")
    env = ENVIRON | {"TMPDIR": str(tmp_path)}
    with start("--", sys.executable, path, env=env) as process:
        ids = ids_of(process, num_workers=2)
        process.send_signal(number)
        assert process.wait(SECONDS) == code
        assert gone(ids)
        wait_for(lambda: not list(tmp_path.glob("tfdist-*")))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_ignored_signal_does_not_end_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """As after `nohup`, and in background jobs of scripts."""
    body = 'print("READY")\nwhile not pathlib.Path("sent").exists(): time.sleep(0.05)'
    line = command("--num-workers", "1", "--", sys.executable, program(tmp_path, body))
    ignoring = f"trap '' {number.name.removeprefix('SIG')}; exec \"$@\""
    with piped("sh", "-c", ignoring, "sh", *line, cwd=tmp_path) as process:
        wait_for_line(process, "[0] READY")
        process.send_signal(number)
        (tmp_path / "sent").touch()
        assert process.wait(SECONDS) == 0


def test_only_two_interrupts_end_workers_that_save(tmp_path: Path) -> None:
    body = """
def save(number, frame):
    print("SAVING")
    time.sleep(600)
signal.signal(signal.SIGTERM, save)
print("READY")
time.sleep(600)
"""
    line = ["--num-workers", "1", "--grace", "300", "--", sys.executable]
    with start(*line, program(tmp_path, body)) as process:
        wait_for_line(process, "[0] READY")
        process.send_signal(signal.SIGTERM)
        wait_for_line(process, "[0] SAVING")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
        assert process.stderr is not None
        assert any("Press Ctrl-C again to kill them" in text for text in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130


def test_terminates_children_of_successful_workers(tmp_path: Path) -> None:
    done = launch_program(tmp_path, LINGERS, "--num-workers", "1")
    assert done.returncode == 0
    assert gone([int(word) for word in done.stdout.split()[-2:]])


def test_interrupt_lets_workers_save(tmp_path: Path) -> None:
    body = f"""
try:
    {LINGERS.strip().replace(chr(10), chr(10) + "    ")}
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path(f"saved-{{rank}}").touch()
    raise
"""
    with start("--", sys.executable, program(tmp_path, body), cwd=tmp_path) as process:
        ids_of(process, num_workers=2)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.parametrize("ignored", ["SIGINT", "SIGTERM"])
def test_worker_that_ignores_a_signal_gets_a_stronger_one(tmp_path: Path, ignored: str) -> None:
    body = f"""
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.{ignored}, signal.SIG_IGN)
{LINGERS}
time.sleep(600)
"""
    flags = ["--grace", "1", "--num-workers", "1"]
    with start(*flags, "--", sys.executable, program(tmp_path, body)) as process:
        ids = ids_of(process, num_workers=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert gone(ids)


def test_run_with_servers_ends_with_its_chief(tmp_path: Path) -> None:
    body = 'print(task["type"]); time.sleep(600 if task["type"] != "chief" else 0)'
    done = launch_program(tmp_path, body, "--num-ps", "1", "--num-workers", "2", "--grace", "1")
    assert done.returncode == 0, done.stderr
    assert "[chief] chief" in done.stdout.splitlines()


def test_restarts_a_worker_of_parameter_servers(tmp_path: Path) -> None:
    body = """
tried = pathlib.Path("tried")
if task["type"] == "worker" and not tried.exists():
    tried.touch()
    raise SystemExit(3)
if task["type"] == "worker":
    pathlib.Path("came back").touch()
while task["type"] == "chief" and not pathlib.Path("came back").exists():
    time.sleep(0.05)
time.sleep(600 if task["type"] != "chief" else 0)
"""
    path = program(tmp_path, body)
    flags = ["--num-ps", "1", "--num-workers", "1", "--grace", "1"]
    done = launch(*flags, "--max-restarts", "1", "--", sys.executable, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for left in ("tried", "came back"):
        (tmp_path / left).unlink()
    done = launch(*flags, "--", sys.executable, path, cwd=tmp_path)
    assert done.returncode == 3
    assert "error: worker 0 was the first to fail" in done.stderr


def test_dry_run_prints_the_commands() -> None:
    done = launch("--dry-run", "--strategy", "multi_worker", "--epochs", "2")
    assert done.returncode == 0
    for rank, line in enumerate(done.stdout.splitlines()):
        prefix, *words = shlex.split(line)
        assert prefix == f"[{rank}]"
        assert words[-6:] == ["-m", "tfdist.train", "--strategy", "multi_worker", "--epochs", "2"]
        variables = dict(word.split("=", 1) for word in words if word.split("=")[0].isupper())
        assert json.loads(variables["TF_CONFIG"])["task"] == {"type": "worker", "index": rank}
    assert rank == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--num-workers 3 a.py", "PYTHON a.py"),
        ("--num-workers 3 a.py --num-workers 9", "PYTHON a.py --num-workers 9"),
        ("--num-workers=3 -- a.py -x", "PYTHON a.py -x"),
        ("--num-workers=3 python -m a", "python -m a"),
        ("--num-workers=3 -- python a.py", "python a.py"),
        ("--recipe a.py --num-workers=3", "PYTHON -m tfdist.train --recipe a.py"),
    ],
)
def test_command_needs_no_dashes_before_it(arguments: str, words: str) -> None:
    options = parse(arguments.split())
    assert options.command == tuple(words.replace("PYTHON", sys.executable).split())
    assert options.num_workers == 3


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ([], "multi_worker"),
        (["--num-ps", "1"], "parameter_server"),
        (["--via", "horovodrun"], "horovod"),
        (["--print-k8s", "mpijob"], "horovod"),
        (["--strategy=horovod"], "horovod"),
        (["--mesh", "data=2,pipeline=2"], "pipeline"),
        (["--mesh=data=2", "--process-group", "tensorflow"], "multi_worker"),
        (["--num-workers", "1"], ""),
        (["--config", "batch.yaml"], "multi_worker"),
        (["--config", "servers.yaml", "--config=batch.yaml"], "parameter_server"),
        (["--config", "servers.yaml", "--strategy", "horovod"], "horovod"),
        (["--config", "not/here.yaml"], "multi_worker"),
        (["--", "python", "train.py", "--config", "servers.yaml"], ""),
        (["--", "python", "train.py", "--strategy", "horovod"], "horovod"),
    ],
)
def test_launcher_chooses_the_default_strategy(
    flags: list[str], strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batch.yaml").write_text("batch_size: 32")
    Path("servers.yaml").write_text("epochs: 3\nstrategy: parameter_server")
    given = parse(flags)
    chosen = with_strategy(given)
    assert chosen.strategy == strategy
    assert chosen.command in (given.command, (*given.command, "--strategy", strategy))


@pytest.mark.parametrize(
    ("flags", "by_horovod"),
    [
        (["--strategy", "pipeline"], True),
        (["--strategy", "channel_split"], True),  # deprecated name of tensor_parallel
        (["--strategy", "pipeline", "--process-group", "tensorflow"], False),
        (["--strategy", "multi_worker"], False),
    ],
)
def test_horovod_is_needed_only_by_its_strategies(flags: list[str], by_horovod: bool) -> None:
    assert with_strategy(parse(flags)).by_horovod == by_horovod


def test_single_process_strategy_in_a_file_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 2\nstrategy: mirrored")
    assert main(["--config", str(path)]) == 1
    stderr = capsys.readouterr().err
    assert (
        f"{path}, line 2: strategy 'mirrored' is a single-process strategy: each of the 2 workers "
        "would" in stderr
    )
    assert main(["--dry-run", "--config", str(path), "--strategy", "multi_worker"]) == 0  # the fix


def test_prints_the_command_of_each_host(tmp_path: Path) -> None:
    path = program(tmp_path, 'print("on", rank)')
    flags = ["--hosts", "127.0.0.1:2,127.0.0.2:1", "--port", "23170"]
    done = launch(*flags, "--", sys.executable, path)
    lines = done.stdout.splitlines()
    assert lines[::2] == ["# on 127.0.0.1", "# on 127.0.0.2"]
    output = []
    for line in lines[1::2]:  # both addresses are this host
        output.append(sorted(run(*shlex.split(line)).stdout.splitlines()))
    assert output == [["[0] on 0", "[1] on 1"], ["[2] on 2"]]


def test_script_may_have_a_double_dash_among_its_arguments(tmp_path: Path) -> None:
    path = program(tmp_path, "print(sys.argv[1:])")
    done = launch("--num-workers", "1", path, "--name", "a b", "--", "--num-workers", "3")
    assert done.stdout == "[0] ['--name', 'a b', '--', '--num-workers', '3']\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-workers", "0"], "--num-workers: expected a number of at least 1"),
        (["--num-workers", "two"], "expected a number of at least 0, got 'two'"),
        (["--bogus", "--", "true"], "unknown '--bogus' before --: expected"),
        (["--"], "no command after --"),
        (["--epochs", "2", "a.py"], "put the flags of the script after it"),
        (
            ["--num-worker", "2", "a.py"],
            "before it: python -m tfdist.launch [flags] a.py ... Did you mean --num-workers?",
        ),
        (["not/there", "--", "a"], "unknown 'not/there' before --: expected"),
        (["--num-workers", "2", "not/there"], "Cannot start 'not/there'"),
        (["--hosts", "a:x"], "expected host:workers"),
        (["--hosts", "a:1,a:1"], "expected host:workers"),
        (["--hosts", "a:2", "--num-workers", "3"], "--hosts has 2 workers, but --num-workers is 3"),
        (["--on", "a"], "--on a: expected one of --hosts (none)"),
        (["--via", "magic"], "invalid choice: 'magic'"),
        (["--num-ps", "1", "--via", "mpirun"], "--num-ps works only on this host"),
        (["--port", "4000"], "--port has no effect without --hosts"),
        (["--gpus-per-worker", "2", "--num-ps", "1"], "servers uses one GPU"),
        (["--cpus-per-worker", "1"], "--cpus-per-worker has no effect without --via ray"),
        (["--name", "own"], "--name has no effect without"),
        (["--image", "own", "--print-slurm"], "--image has no effect without --print-k8s"),
        (["--strategy", "mirrored"], "'mirrored' is a single-process strategy"),
        (["not-there.py", "--flag"], "not-there.py: there is no such script. Give its path from"),
        (["--", "python3", "-u", "not-there.py"], "not-there.py: there is no such script."),
        (["--", "/not/there"], "Cannot start '/not/there' (No such file or directory)"),
        *(
            (["--", *words.split()], f"'{words}' reads its program from standard input")
            for words in (
                *("python", "python -", "python3.11 -u -", "python -X dev -W error"),
                *("env A=1 python -", "python /dev/stdin", "bash -s", "sh -x"),
            )
        ),
    ],
)
def test_errors_are_two_lines_at_most(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert len(printed.err.splitlines()) <= 2
    assert printed.out == ""
