"""Which layers are split, and along which axis, without training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import pytest
import yaml
from keras import layers

from tfdist.config import TrainConfig
from tfdist.console.settings_file import Setting
from tfdist.errors import ConfigurationError, TooFewDevicesError
from tfdist.run import flags
from tfdist.strategies.tensor_parallel import splits
from tfdist.strategies.tensor_parallel.layout import Layout, layout
from tfdist.strategies.tensor_parallel.rules import Rules
from tfdist.strategies.tensor_parallel.strategy import TensorParallel
from tfdist.tools.verify.__main__ import main


def planned(*stack: Any, rules: Rules | None = None, smallest: int = 1) -> Layout:
    """Returns the layout of a stack of layers over two devices."""
    return layout(keras.Sequential(list(stack)), [], 2, rules, smallest)


def kinds(found: Layout) -> list[str]:
    """Returns how each split layer is split."""
    return [split.kind for split in found.splits]


def test_row_split_follows_column_split() -> None:
    result = planned(
        keras.Input((8, 8, 3)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(4, 1),
        layers.Flatten(),  # mixes channels and positions
        layers.Dense(6, activation="softmax"),  # needs all channels
        layers.Dense(6, activation="tanh"),
        layers.Dense(1),
    )
    assert kinds(result) == ["column", "row", "column", "column", "row"]


def test_groups_and_depths_have_their_own_inputs() -> None:
    result = planned(
        keras.Input((8, 8, 4)),
        layers.Conv2D(6, 3, groups=2),
        layers.DepthwiseConv2D(3, depth_multiplier=2),
        layers.Conv2D(5, 1),
    )
    assert kinds(result) == ["channels", "channels", "row"]
    assert result.splits[1].cuts[1].division.sizes == [6, 6]  # two per channel


def test_unsupported_layers_are_not_split() -> None:
    inputs = keras.Input((4, 6))
    hidden = layers.MultiHeadAttention(2, 3, activity_regularizer="l2")(inputs, inputs)
    hidden = layers.Dense(6, kernel_constraint="non_neg")(hidden)
    hidden = layers.TimeDistributed(layers.Dense(6))(hidden)
    hidden = layers.LSTM(6)(hidden)
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    result = layout(model, [], 2, None, 1)
    assert kinds(result) == ["row"] or [s.layer.name for s in result.splits] == []
    assert not splits.ways(layers.Dense(1), 2)  # not built
    assert layout(model, [keras.optimizers.Lamb()], 2, None, 1).reason_whole is not None


def test_layers_that_share_a_weight_are_not_split() -> None:
    first, second, third = (layers.Dense(4) for _ in range(3))
    model = keras.Sequential([keras.Input((4,)), first, second, third])
    second._tracker.unlock()
    second._kernel = first._kernel
    assert [split.layer for split in layout(model, [], 2, None, 1).splits] == [third]


def test_rules_select_axes_of_weights() -> None:
    stack = [keras.Input((4,)), layers.Dense(6, name="up"), layers.Dense(4, name="down")]
    result = planned(*stack, rules={"up/kernel": ("model", None)})
    assert [(s.layer.name, s.kind) for s in result.splits] == [("up", "row")]
    with pytest.raises(ConfigurationError, match="no weight that can be split has a path"):
        planned(*stack, rules={"over/kernel": ("model", None)})
    with pytest.raises(ConfigurationError, match=r"cuts axis 0, 1 of .*split along axis 1 \(col"):
        planned(*stack, rules={"up/kernel": ("model", "model")})


def test_one_device_raises() -> None:
    with pytest.raises(TooFewDevicesError, match="use devices=2 or more"):
        TensorParallel(1)


@pytest.mark.parametrize(
    ("text", "bias_axes", "shape", "outputs", "inputs"),
    [
        ("abc,cd->abd", "d", (3, 5), (1, 2, 0), (0, 2, None)),
        ("...x,xy->...y", "y", (3, 5), (1, -1, 0), (0, -1, None)),
        ("bqm,muh->bquh", "uh", (6, 4, 3), (1, 2, 0), (0, 2, None)),
        ("bquh,uhm->bqm", None, (4, 3, 6), (2, 2, None), (0, 2, None)),
        ("ab,ab->ab", None, (3, 5), None, None),
    ],
)
def test_einsum_equation_determines_the_split_axes(
    text: str, bias_axes: str | None, shape: tuple[int, ...], outputs: Any, inputs: Any
) -> None:
    assert splits.output_axis(text, bias_axes, shape) == outputs
    assert splits.input_axis(text, shape) == inputs


# ---- rules ----


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
