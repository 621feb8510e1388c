"""Exit codes of the commands, and the message about a wrong flag."""

from __future__ import annotations

import pytest

from tfdist.console import command
from tfdist.errors import ConfigurationError, DataError


def test_exit_code_follows_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> None:
        raise DataError("Expected 3 rows, got 2: add one.")

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert command.run(lambda: None) == 0
    assert command.run(lambda: 3) == 3
    assert command.run(wrong) == 1
    assert capsys.readouterr().err == "error: Expected 3 rows, got 2: add one.\n"
    assert command.run(interrupted) == 130


def even(word: str) -> int:
    return int(word) * 2


def test_help_says_only_what_users_understand() -> None:
    parser = command.parser("python -m tfdist.thing", "Does a thing.")
    parser.add_argument("--half", type=even, help="half of it (of the whole)")
    parser.add_argument("--name", type=str, help="a name")
    parser.add_argument("--number", type=even, default=4, help="a number")
    shown = parser.format_help()
    assert "half of it (of the whole)\n" in shown
    assert "a name (type: str)" in shown
    assert "a number (default: 4)" in shown


def test_wrong_flag_mentions_help() -> None:
    parser = command.parser("python -m tfdist.thing", "Does a thing.")
    with pytest.raises(ConfigurationError, match=r"--wrong\npython -m tfdist\.thing --help lists"):
        command.parse(parser, ["--wrong"])
