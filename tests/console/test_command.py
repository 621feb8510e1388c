from __future__ import annotations

import pytest

from tfdist.console import command
from tfdist.errors import ConfigurationError, DataError


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> None:
        raise DataError("Expected 3 rows, got 2: add one.")

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert command.run(lambda: None) == 0
    assert command.run(lambda: 3) == 3
    assert command.run(wrong) == 1
    assert capsys.readouterr().err == "error: Expected 3 rows, got 2: add one.\n"
    assert command.run(interrupted) == 130


def test_wrong_flag_mentions_help() -> None:
    parser = command.parser("python -m tfdist.thing", "Does a thing.")
    with pytest.raises(ConfigurationError, match=r"--wrong\npython -m tfdist\.thing --help lists"):
        command.parse(parser, ["--wrong"])
