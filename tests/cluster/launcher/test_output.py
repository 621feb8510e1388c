"""The output of workers, by launcher and by mpirun."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.starting import ENVIRON, command, piped, python, run
from tfdist.cluster.launcher import processes
from tfdist.cluster.launcher.output import Relay
from tfdist.cluster.launcher.plan import Process
from tfdist.cluster.launcher.processes import Streams

FOR_EVER = "while True: print('line', flush=True)"


def relayed(code: str, name: str = "3") -> tuple[str, str, Relay]:
    """Returns the relayed output and errors of a program, and the relay."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "ascii") for _ in range(2))
    relay = Relay(name, out, err)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with child:
        relay.start(child)
        child.wait(60)
        relay.join(60)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return texts[0], texts[1], relay


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"one\ntwo", "[3] one\n[3] two\n"),
        (b"", ""),
        (b"10%\r50%\r100%\n", "[3] 100%\n"),
        (b"windows\r\n", "[3] windows\n"),
        ("\u2502".encode(), "[3] ?\n"),  # on a terminal that cannot encode it
        (b"\xff\n", "[3] ?\n"),
    ],
)
def test_lines_are_prefixed_and_encoded(written: bytes, shown: str) -> None:
    out, err, _ = relayed(f"import sys; sys.stdout.buffer.write({written!r})")
    assert (out, err) == (shown, "")


def test_lines_without_a_name_have_no_prefix() -> None:
    assert relayed("print('a')", name="")[0] == "a\n"


@pytest.mark.parametrize("rank", ["", "[1] ", "[1,0]<stderr>: "])
def test_omits_tensorflow_startup_messages(rank: str) -> None:
    notes = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795315473.848336   20687 port.cc:153] oneDNN custom operations are on.",
        "E0000 00:00:1795315473.848336   20687 cuda_blas.cc:9] an error",
    ]
    code = f"import sys; print(*{[rank + note for note in notes]}, sep='\\n', file=sys.stderr)"
    _, err, relay = relayed(code, name="")
    assert err.splitlines() == [rank + notes[2]]
    assert relay.error_output() == rank + notes[2]


def test_reported_failure_is_the_last_traceback() -> None:
    code = """
import sys, traceback
for text in ("first", "second"):
    try:
        raise ValueError(text)
    except ValueError:
        traceback.print_exc()
"""
    words = relayed(code)[2].error_output()
    assert words.startswith("Traceback")
    assert words.endswith("ValueError: second")
    assert "first" not in words


def test_reported_failure_of_one_rank_among_several() -> None:
    code = """
import sys
lines = ["[0] noise", "[1] Traceback (most recent call last):", "[0] noise", "[1] Error: x"]
print(*lines, sep="\\n", file=sys.stderr)
"""
    words = relayed(code)[2].error_output()
    assert words.splitlines() == ["[1] Traceback (most recent call last):", "[1] Error: x"]


def test_reported_failure_without_a_traceback_is_the_last_lines() -> None:
    words = relayed("import sys\nfor i in range(30): print(i, file=sys.stderr)")[2].error_output()
    assert words.splitlines() == [str(number) for number in range(20, 30)]


class SlowStream(io.StringIO):
    """A stream whose reader takes no line for a while."""

    def write(self, text: str) -> int:
        if not self.getvalue():
            time.sleep(1.5)
        return super().write(text)


def test_slow_reader_gets_the_last_lines() -> None:
    line, out = (sys.executable, "-c", "print('first'); print('last')"), SlowStream()
    assert processes.run([Process("0", line)], grace=1, streams=Streams(out=out)) is None
    assert out.getvalue() == "[0] first\n[0] last\n"


@contextlib.contextmanager
def lost_output(kind: str) -> Iterator[int]:
    """Yields the descriptor of an output that cannot be written."""
    if kind == "full disk":
        read, write = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    else:
        read, write = os.pipe() if kind == "reader that left" else pty.openpty()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


@pytest.mark.parametrize("kind", ["reader that left", "full disk", "closed terminal"])
@pytest.mark.parametrize("with_errors", [False, True], ids=["output", "output and errors"])
def test_run_continues_without_its_output(kind: str, with_errors: bool) -> None:
    # More than a pipe holds.
    code = "import sys\nfor _ in range(3000): print('x' * 50); print('y', file=sys.stderr)"
    with lost_output(kind) as output:
        line = command("--num-workers", "1", "--", sys.executable, "-c", code)
        pipe = subprocess.STDOUT if with_errors else subprocess.PIPE
        with piped(*line, stdout=output, stderr=pipe) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    if not with_errors:
        lost = [one for one in errors.splitlines() if not one.endswith("y")]
        assert len(lost) == 1
        assert lost[0].startswith("warning: Standard output cannot be written (")


def test_training_in_a_script_continues_without_its_output() -> None:
    code = """
import sys
from tfdist.console import streams
before = sys.stdout
with streams.guarded():  # as in `fit`
    print("a progress bar")
assert sys.stdout is before
"""
    with lost_output("full disk") as output:
        line = (sys.executable, "-c", code)
        done = subprocess.run(line, env=ENVIRON, stdout=output, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr.count(b"\n")) == (0, 1)


def test_error_of_a_relay_ends_the_run() -> None:
    code = f"""
import sys
from tfdist.console import command
from tfdist.cluster.launcher import output, processes
from tfdist.cluster.launcher.plan import Process
def fail(*arguments):
    raise LookupError("a fault of the relay")
output.Relay._show = fail
command_line = (sys.executable, "-c", {FOR_EVER!r})
raise SystemExit(command.run(lambda: processes.run([Process("0", command_line)], grace=1)))
"""
    done = python("-c", code, code=1)
    assert "LookupError: a fault of the relay" in done.stderr


HYDRA = {"PMI_RANK": "4", "PMI_SIZE": "5"}


def prefixed(*program: str, fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    wrapper = (sys.executable, "-m", "tfdist.cluster.launcher.output")
    return run(*wrapper, *program, env=ENVIRON | HYDRA, pass_fds=fds, code=None)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_exit_code_of_the_command(code: str, exit_code: int) -> None:
    done = prefixed(sys.executable, "-c", f"print('a', flush=True); {code}")
    assert done.stdout == "[4] a\n"
    assert done.returncode == exit_code


def test_inherited_file_descriptors_stay_open() -> None:
    reader, writer = os.pipe()
    try:
        code = f"import os; os.write({writer}, b'x')"
        assert prefixed(sys.executable, "-c", code, fds=(writer,)).returncode == 0
        assert os.read(reader, 1) == b"x"
    finally:
        os.close(reader)
        os.close(writer)


def test_missing_program_is_reported() -> None:
    done = prefixed("/not/there")
    assert done.returncode == 127
    assert done.stderr == "error: '/not/there' cannot be started (No such file or directory).\n"
