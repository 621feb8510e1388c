"""The wrapper that mpirun starts: runs the worker, and prefixes its output lines with the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.starting import ENVIRON, run

HYDRA = {"PMI_RANK": "4", "PMI_SIZE": "5"}


def prefixed(*program: str, fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    wrapper = (sys.executable, "-m", "tfdist.cluster.launcher.output")
    return run(*wrapper, *program, env=ENVIRON | HYDRA, pass_fds=fds, code=None)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
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
