"""The doctor command: its exit code, its fixes and its JSON."""

from __future__ import annotations

import json

import pytest

from tfdist.tools.doctor import __main__ as doctor
from tfdist.tools.doctor import host
from tfdist.tools.doctor.report import Check

FAILED = Check("port", "in [use]", "wrong", "end the other")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs only the host's checks, which pass."""
    monkeypatch.setattr(doctor, "GROUPS", {"host": ("host", "checks")})
    monkeypatch.setattr(host, "checks", lambda: [Check("cores", "2")])


@pytest.mark.usefixtures("groups")
def test_host_without_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    line = {"name": "cores", "value": "2", "state": "ok", "fix": ""}
    assert json.loads(capsys.readouterr().out) == {"healthy": True, "groups": {"host": [line]}}


@pytest.mark.usefixtures("groups")
def test_failed_check_shows_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "checks", lambda: [Check("cores", "2"), FAILED])
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "in [use]" in out
    assert "fix: end the other" in out
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


@pytest.mark.usefixtures("groups")
def test_missing_state_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "checks", lambda: [FAILED._replace(state="missing")])
    assert doctor.main(["--json"]) == 0


@pytest.mark.usefixtures("groups")
def test_group_that_fails_is_a_red_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checks() -> list[Check]:
        raise KeyError("surprise")

    monkeypatch.setattr(host, "checks", checks)
    assert doctor.main([]) == 1
    assert "KeyError: 'surprise'" in capsys.readouterr().out


def test_checks_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--json", "--no-all-reduce"])
    result = json.loads(capsys.readouterr().out)["groups"]
    assert list(result) == ["versions", "devices", "processes", "host"]
    assert all(result.values())
