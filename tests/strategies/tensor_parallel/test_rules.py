"""Layout rules in a configuration: inline or in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tfdist.config import TrainConfig
from tfdist.console.settings_file import Setting
from tfdist.errors import ConfigurationError
from tfdist.run import flags
from tfdist.tools.verify.__main__ import main

RULES = {"hidden/kernel": [None, "model"], "logits/kernel": ["model", None]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(RULES))
    return path


def test_configuration_contains_the_rules(file: Path) -> None:
    config = flags.resolve([{"layout": Setting(str(file), "--layout")}])
    assert config.strategy_options() == {"layout": RULES}
    file.unlink()
    assert TrainConfig(**yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; expected lines like 'dense/kernel: [null, model]'"),
        ("a: [", "is no YAML; expected lines like"),
        ("- a", "holds no rules; expected lines like"),
        ("dense/kernel: model", "expected a valid list"),
        ("'(': [null, model]", r"the rule '(' of a layout is not a regular expression"),
    ],
)
def test_invalid_rules_file_raises(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        flags.resolve([{"layout": Setting(str(path), "--layout")}])
    assert str(raised.value).startswith("--layout: ")
    assert message in str(raised.value)


@pytest.mark.long
def test_verify_takes_rules(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--strategy", "tensor_parallel", "--layout", str(file)]) == 0
    assert capsys.readouterr().out.startswith("PASS tensor_parallel")
    file.write_text("dense/kernel: [null, model]")
    assert main(["--strategy", "tensor_parallel", "--layout", str(file)]) == 1
    assert re.search(r"there are \S*hidden/kernel, \S*logits/kernel", capsys.readouterr().err)
    assert main(["--layout", str(file)]) == 1
    assert "these options need a single strategy" in capsys.readouterr().err
