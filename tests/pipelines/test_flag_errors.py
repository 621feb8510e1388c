"""Errors of a command line name flags and values, and no Python types."""

from __future__ import annotations

import pytest

from pipelines.check.__main__ import main as check


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--batch-size", "0"], "error: --batch-size: expected a number above 0, got 0\n"),
        (["--batch-size", "x"], "error: --batch-size: expected an integer, got 'x'\n"),
        (["--shuffle-buffer", "-1"], "error: --shuffle-buffer: expected a number from 0, got -1\n"),
    ],
)
def test_invalid_number(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["data", *words]) == 1
    assert problem in capsys.readouterr().err
