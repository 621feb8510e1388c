"""Hosts on one machine, and steps over a slow link between them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts
from benchmarks.link import ENGINES, judge
from benchmarks.link_protocol import Times
from tests.tools.bench.test_step import run


def test_step_is_compared_with_the_longer_of_its_parts() -> None:
    times = {"compute": 100.0, "send": 200.0, "at once": 300.0, "in buckets": 250.0}
    taken = {name: [Times(ms, 150.0)] for name, ms in times.items()}
    result = judge({"bytes": 8, "buckets": 4, "last_bucket": 0.25}, taken)
    assert result["steps"]["at once"]["to_sum"]["median"] == pytest.approx(1.0)
    ratios = result["steps"]["in buckets"]
    assert ratios["to_longer"]["median"] == pytest.approx(1.0)
    assert ratios["to_longer"]["met"] is True
    assert ratios["to_core"]["median"] == pytest.approx(250 / (100 + 150 + 50))
    assert ratios["to_at_once"]["median"] == pytest.approx(250 / 300)


@pytest.mark.long
@pytest.mark.processes
def test_link_smoke(tmp_path: Path) -> None:
    links = ["2gbit", "1gbit"]
    flags = ["--smoke", "--links", *links, "--json", "a.json"]
    run(tmp_path, "link", *flags, program="benchmarks")
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {result["link"] for result in results} == set(links)
    for result in results:
        ways = ENGINES[result["engine"]].ways
        assert list(result["ms"]) == ["compute", "send", *ways]
        assert result["buckets"] > 4


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
