"""Precedence of flags, files and recipes, and errors of one or two lines."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from pydantic import BaseModel, Field

from pipelines import storage
from tests.support.commands import require_obstore
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run import flags as command_line

RECIPE = "test_recipes.tiny"
RECIPE_FLAG = f"--recipe={RECIPE}"


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A recipe whose defaults differ from tfdist's in two fields, one of them None there."""
    module = ModuleType(RECIPE)
    module.DEFAULTS = {"epochs": 7, "lr_reference_batch": 32}  # type: ignore[attr-defined]
    for member in ("build_model", "train_data", "validation_data"):
        setattr(module, member, lambda *arguments: None)
    monkeypatch.setitem(sys.modules, "test_recipes", ModuleType("test_recipes"))
    monkeypatch.setitem(sys.modules, RECIPE, module)
    return module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text("epochs: 9\nsteps_per_call: 4\nsync_batch_norm: true\nrun_dir: 2024\n")
    return path


def parse(*arguments: str) -> TrainConfig:
    return command_line.parse("program", "Does it.", [RECIPE_FLAG, *arguments])


def test_recipe_overrides_defaults() -> None:
    config = parse()
    assert (config.epochs, config.lr_reference_batch) == (7, 32)
    assert config.batch_size == TrainConfig().batch_size


def test_file_overrides_recipe(file: Path) -> None:
    config = parse(f"--config={file}")
    assert (config.epochs, config.steps_per_call, config.sync_batch_norm) == (9, 4, True)
    assert (config.lr_reference_batch, config.run_dir) == (32, "2024")


def test_file_in_a_bucket(file: Path) -> None:
    require_obstore()
    url = "memory://bucket/run/config.yaml"
    with pytest.raises(ConfigurationError, match=rf"--config {url}: No such object"):
        parse(f"--config={url}")
    storage.RemotePath(url).write_bytes(file.read_bytes())
    assert parse(f"--config={url}") == parse(f"--config={file}")


def test_flags_override_the_file_wherever_they_stand(file: Path) -> None:
    flags = ["--epochs", "2", "--no-sync-batch-norm"]
    before = parse(*flags, "--config", str(file))
    after = parse("--config", str(file), *flags)
    assert before == after
    assert (before.epochs, before.steps_per_call, before.sync_batch_norm) == (2, 4, False)


def test_later_file_overrides_earlier(file: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("epochs: 11\n")
    config = parse("--config", str(file), "--config", str(later))
    assert (config.epochs, config.steps_per_call) == (11, 4)


@pytest.mark.parametrize(
    "flags", [["--loss-scale=dynamic"], ["--precision=mixed_float16"], ["--precision=float16"]]
)
def test_dynamic_loss_scale_takes_its_options(flags: list[str]) -> None:
    assert parse(*flags, "--loss-scale-initial=8").loss_scale_initial == 8


def test_former_names_of_fields_are_accepted(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("recompute: all\n")
    assert parse("--recompute", "all").remat == "all"
    assert parse("--config", str(old)).remat == "all"
    assert parse("--config", str(old), "--remat", "none").remat == "none"
    assert TrainConfig(recompute="all") == TrainConfig(remat="all")


def test_recipe_may_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: {RECIPE}\n")
    assert command_line.parse("program", "", ["--config", str(path)]).epochs == 7


class Hyperparameters(BaseModel):
    depth: int = Field(18, ge=1)
    widths: list[int] = [8]
    activation: str = "relu"


def test_hyperparameters_come_from_flags_and_files(recipe: ModuleType, tmp_path: Path) -> None:
    vars(recipe)["Hyperparameters"] = Hyperparameters
    path = tmp_path / "own.yaml"
    path.write_text("set:\n  depth: 50\n  activation: gelu\n")
    config = parse("--set", "depth=34", f"--config={path}", "--set=widths=[1, 2]")
    assert config.set == {"depth": 34, "widths": [1, 2], "activation": "gelu"}
    assert Hyperparameters.model_validate(config.set).depth == 34
    path.write_text(config.to_yaml())
    assert parse(f"--config={path}") == config
    assert parse().set == {"depth": 18, "widths": [8], "activation": "relu"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("depth=x", "--set depth: expected a valid integer"),
        ("y=[!!python/object:x]", "is not a list or mapping in YAML"),
        ("y=[2001-99-99]", "is not a list or mapping in YAML"),
        ("y=" + "[" * 5000, "is not a list or mapping in YAML"),
        ("depth=0", "--set depth: expected greater than or equal to 1, got '0'"),
        ("dept=3", "unknown hyperparameter of recipe 'test_recipes.tiny'. Did you mean depth?"),
        ("lr=3", "'test_recipes.tiny'. Choose one of depth, widths, activation."),
        ("depth", "--set depth: expected NAME=VALUE"),
    ],
    ids=lambda value: value[:20],
)
def test_invalid_hyperparameters_raise(recipe: ModuleType, setting: str, message: str) -> None:
    vars(recipe)["Hyperparameters"] = Hyperparameters
    with pytest.raises(ConfigurationError) as error:
        parse("--set", setting)
    assert message in str(error.value)


def test_arguments_of_the_model_are_hyperparameters(recipe: ModuleType) -> None:
    vars(recipe)["Hyperparameters"] = Hyperparameters
    recipe.DEFAULTS = {"model": "mlp", "set": {"dropout": 0.5}}
    own = {"depth": 18, "widths": [8], "activation": "relu"}
    assert parse("--set=units=[4, 2]").set == own | {"units": [4, 2], "dropout": 0.5}
    other = parse("--model", "resnet18", "--set=width=3", "--set=depth=2").set
    assert (other["width"], other["stem"], other["depth"]) == (3, "small", 2)
    assert "dropout" not in other
    with pytest.raises(ConfigurationError, match="--set width: unknown hyperparameter"):
        parse("--set=width=3")
    with pytest.raises(ConfigurationError, match=r"got 'resnet'\. Did you mean"):
        parse("--model", "resnet")


def test_hyperparameter_of_a_recipe_without_any_raises(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("seed: 1\nset:\n  depth: 50\n")
    with pytest.raises(ConfigurationError, match="line 3: depth: unknown hyperparameter"):
        parse(f"--config={path}")


def test_every_field_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in shown for name in TrainConfig.model_fields)


def test_shell_completion_offers_the_values_of_a_field() -> None:
    parser = command_line._parser("program", "")
    completers = {a.dest: getattr(a, "completer", None) for a in parser._actions}
    for field, words in {"strategy": ["towers"], "logger": ["csv"], "recipe": ["digits"]}.items():
        assert set(words) <= set(completers[field]())
    assert completers["verbose"]() == ["auto"]
    assert completers["epochs"] is completers["run_dir"] is None


def test_print_config_can_be_read_back(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--config", str(file), "--print-config", "--devices", "GPU:0,GPU:1")
    assert exit_.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert yaml.safe_load(printed.read_text())["devices"] == ["GPU:0", "GPU:1"]
    again = command_line.parse("program", "", ["--config", str(printed)])
    assert again == parse("--config", str(file), "--devices", "GPU:0,GPU:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "foo"], "'one_device', 'mirrored', 'central_storage', 'towers'"),
        (["--epochs", "none"], "--epochs: expected a valid integer, got 'none'"),
        (["--loss-scale-initial", "8"], "--loss-scale-initial: has no effect without dynamic loss"),
        (
            ["--early-stopping", "loss"],
            "--early-stopping: expected a value like val_loss:5, got 'loss'",
        ),
        (["--epochs"], "--epochs: expected one argument"),
        (["--loss-scale", "big"], "--loss-scale: expected 'auto', 'none' or 'dynamic' or a"),
        (["--learning-rate", "-1"], "--learning-rate: expected greater than 0, got '-1'"),
        (["--bogus", "3"], "unrecognized arguments: --bogus 3\n"),
        (["--epoch=3"], "unrecognized arguments: --epoch=3. Did you mean --epochs?"),
        (["--strategy", "miror"], "got 'miror'. Did you mean mirrored?"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: No such file"),
        (["--config"], "--config: expected one argument"),
        (["--recipe", "nothing"], "There is no recipe 'nothing'"),
        (["--recipe", "digit"], "Did you mean digits?"),
        (["--recipe", "imagefolder"], "Did you mean image_folder?"),
        (["--recipe", "resnet50"], "Did you mean imagenet_resnet50?"),
        (["--recipe", "text"], "Did you mean gpt_text or text_classifier?"),
        (["--lr", "0.1"], " or --learning-rate or --lr-rule?"),
        (["--bs", "8"], "--bs 8. Did you mean --batch-size?\n"),
        (["--recipe", "tfdist.config"], "tfdist.config is not a recipe: it lacks DEFAULTS"),
    ],
)
def test_invalid_flags_raise(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse(*arguments)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"# hm\nepocs: 3", ", line 2: epocs: unknown field. Did you mean epochs?"),
        (b"seed: 1\nepochs: [3]", ", line 2: epochs: expected a valid integer, got [3]"),
        (b"strategy: towrs", ", line 1: strategy: expected 'one_device', 'mirrored', "),
        (b"a: [b", ", line 1: invalid YAML: expected ',' or ']'"),
        (b"a: !b c", ", line 1: invalid YAML: could not determine a constructor"),
        (b"seed: 1\n\nseed: 2", ", line 3: seed: duplicate field"),
        (b"loss_scale_growth_factor: 3", ", line 1: loss_scale_growth_factor: has no effect"),
        (b"5", "not a mapping; expected lines like 'epochs: 3'"),
        (b"# nothing", "the file is empty"),
        (bytes(range(8)), "not a text file"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_invalid_file_raises(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError) as error:
        parse("--config", str(path))
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "--epochs" not in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"epocs": 3}, "DEFAULTS: epocs: unknown field. Did you mean epochs?"),
        ({"epochs": "x"}, "DEFAULTS: epochs: expected a valid integer"),
        ([1], "expected DEFAULTS like {'epochs': 3}, got [1]"),
    ],
)
def test_invalid_defaults_of_a_recipe_raise(
    recipe: ModuleType, defaults: object, message: str
) -> None:
    recipe.DEFAULTS = defaults
    with pytest.raises(ConfigurationError) as error:
        parse()
    assert RECIPE in str(error.value)
    assert message in str(error.value)


def test_import_error_inside_a_recipe_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "broken_recipe_package").mkdir()
    (tmp_path / "broken_recipe_package" / "one.py").write_text("import not_installed_at_all\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
            parse("--recipe", "broken_recipe_package.one")
    finally:
        sys.path.remove(str(tmp_path))
