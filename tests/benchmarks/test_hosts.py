"""Hosts on one machine are removed with the process that created them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts

_PROGRAM = """
import pathlib, sys
from benchmarks.hosts import NotAllowedError, make_hosts

try:
    with make_hosts(pathlib.Path(sys.argv[1])) as hosts:
        process = hosts.start("a", ["sleep", "600"])
        print("made", flush=True)
        process.wait()
except NotAllowedError as error:
    print(error)
"""


def test_processes_that_have_not_entered_their_host_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, 1)
    (tmp_path / "enter").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(hosts.network, "running", lambda host: [])
    with hosts.start("a", []) as process:
        try:
            hosts.end_all()
            assert process.wait(timeout=10) == -signal.SIGKILL
        finally:
            process.kill()


@pytest.mark.processes
def test_hosts_are_removed_after_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.readline().strip()
        if printed != "made":
            pytest.skip(f"no network namespaces here: {printed}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"tfdist-{process.pid}-" not in listed.stdout
