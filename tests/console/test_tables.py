"""Tables in a narrow terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from tfdist.console import tables


def test_rows_become_paragraphs_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "_console", Console(width=80, highlight=False, markup=False))
    name = "step-00000000000000000123-of-epoch-00000000000000000007"
    tables.numbers(["checkpoint", "written, logs", "size"], [[name, "loss 0.25, " * 6, "12 MB"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == name
    assert max(map(len, lines)) <= 80
    assert "written, logs loss 0.25" in lines[1]
    assert lines[-1].rstrip().endswith("size 12 MB")


def test_headings_wrap_before_names_and_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "_console", Console(width=80))
    headings = ["strategy", "device", *("gradients " * 6).split()]
    row = ["parameter_server", "parameter device", *["46.8 MB"] * 6]
    tables.numbers(headings, [row], num_names=2)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = (line for line in lines if "parameter_server" in line)
    assert line.count("46.8 MB") == 6
