"""`--list-recipes` lists all recipes, and `--new-recipe` writes one that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import without_tensorflow
from tfdist import train
from tfdist.errors import ConfigurationError
from tfdist.run import recipe


def test_every_recipe_is_listed_with_a_description() -> None:
    shown = without_tensorflow("tfdist.train", "--list-recipes")
    for name in recipe.names():
        assert f" {name} " in shown
        assert recipe.first_line(name).endswith("."), name
    assert "_template" not in shown


def test_new_recipe_trains_for_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        train.main(["--new-recipe", "points_of_mine.py"])
    assert exit_.value.code == 0
    assert "--recipe ./points_of_mine.py" in capsys.readouterr().out
    flags = ["--limit-steps=2", "--epochs=1", "--set=width=8", "--verbose=2", "--run-dir=run"]
    given = ["--recipe", "points_of_mine.py", "--strategy=mirrored", "--devices=2"]
    assert train.main([*given, *flags]) == 0
    assert "2/2 - " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("there.py", "there.py: the file already exists"),
        ("there.txt", "expected a name that ends in .py"),
        ("not/there.py", "not/there.py: No such file or directory"),
    ],
)
def test_recipe_that_cannot_be_written_raises(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("mine")
    with pytest.raises(ConfigurationError, match=message):
        recipe.write_new(file)
    assert (tmp_path / "there.py").read_text() == "mine"
