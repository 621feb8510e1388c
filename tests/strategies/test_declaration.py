"""A strategy's declaration defines the flags of its options."""

from __future__ import annotations

import inspect
import itertools
import json

import pytest

from tests.support.starting import python
from tfdist import cluster, strategies
from tfdist.cluster import membership
from tfdist.config import TrainConfig
from tfdist.run import flags

#: Simulates an edit of the table, which is read when the command starts.
_NEW = """
import sys
from types import ModuleType
from typing import Literal

from tfdist.strategies import STRATEGIES, Declaration, Option, create

class Folded:
    def __init__(self, devices=None, num_folds=2, fold="in"):
        self.given = devices, num_folds, fold

STRATEGIES["folded"] = Declaration(
    "__main__:Folded",
    {
        "num_folds": Option(int, "how often", 2),
        "fold": Option(Literal["in", "out"], "which way", "in"),
    },
)
sys.modules["a.recipe"] = sys.modules["a"] = recipe = ModuleType("recipe")
recipe.DEFAULTS = {}
recipe.build_model = recipe.train_data = recipe.validation_data = lambda *arguments: None

from tfdist.errors import TfdistError
from tfdist.run import flags

def parse(*arguments):
    return flags.parse("program", "", ["--recipe=a.recipe", *arguments])

config = parse("--strategy=folded", "--devices=2", "--num-folds", "3")
assert config.num_folds == 3 and config.fold is None
assert "num_folds: 3\\n" in config.to_yaml()
made = create(config.strategy, config.devices, **config.strategy_options())
assert made.given == (2, 3, "in"), made.given
for arguments, says in [
    (["--num-folds=many"], "--num-folds: expected a valid integer, got 'many'"),
    (["--fold=up"], "--fold: expected 'in' or 'out', got 'up'"),
    (["--num-fold=3"], "unrecognized arguments: --num-fold=3"),
]:
    try:
        parse("--strategy=folded", *arguments)
        raise AssertionError(arguments)
    except TfdistError as error:
        assert says in str(error), error
assert "tensorflow" not in sys.modules
try:
    parse("--help")
except SystemExit:
    pass
"""


def test_declared_option_becomes_a_flag() -> None:
    shown = " ".join(python("-c", _NEW).stdout.split())
    assert "--num-folds N folded: how often; default: 2" in shown
    assert "--fold in|out folded: which way; default: in" in shown
    assert "parameter_server|multi_worker|horovod|folded" in shown


def _tf_config(**numbers: int) -> str:
    ports = itertools.count(2222)
    tasks = {kind: [f"a:{next(ports)}" for _ in range(n)] for kind, n in numbers.items()}
    return json.dumps({"cluster": tasks, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize("change", ["other type", "name of a field"])
def test_duplicate_name_raises(change: str) -> None:
    name, kind = {"other type": ("merge_on", "str"), "name of a field": ("epochs", "int")}[change]
    script = (
        "from tfdist.strategies import STRATEGIES, Declaration, Option\n"
        f"STRATEGIES['new'] = Declaration('m:New', {{{name!r}: Option({kind}, '', 1)}})\n"
        "import tfdist.config"
    )
    done = python("-c", script, code=1)
    assert f"defines the option '{name}' differently" in done.stderr


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_declaration_matches_the_class(name: str) -> None:
    declared = strategies.STRATEGIES[name]
    parameters = inspect.signature(declared.load()).parameters
    for option, about in declared.options.items():
        # None: the class computes the default.
        assert parameters[option].default in (about.default, None)


@pytest.mark.parametrize(("former", "name"), strategies.ALIASES.items())
def test_former_names_of_strategies_are_accepted(former: str, name: str) -> None:
    config = flags.parse("program", "", [f"--strategy={former}"])
    assert config.strategy == name
    assert f"strategy: {name}\n" in config.to_yaml()
    assert TrainConfig(strategy=former).strategy == name
    assert strategies.create(former, 2).name == name


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "mirrored"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "horovod"),
        ({"TF_CONFIG": _tf_config(worker=2)}, "multi_worker"),
        ({"TF_CONFIG": _tf_config(worker=2, ps=1)}, "parameter_server"),
    ],
)
def test_automatic_strategy_follows_the_launcher(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(membership, "_in_use", cluster.discover(variables))
    monkeypatch.setattr(
        strategies.Declaration, "load", lambda self: loaded.append(self) or (lambda devices: "new")
    )
    assert strategies.create("auto", 2) == "new"
    assert loaded == [strategies.STRATEGIES[name]]
