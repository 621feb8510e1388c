"""Recipes for large data train for two steps on small data, under several strategies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.conformance.layouts import AnsweringPool, Layout
from tests.recipes import running
from tests.recipes.small import SMALL

#: `make check` trains these on two replicas and the others on one device, except `digits`, which
#: other tests train. `make long` trains all combinations, and under Horovod.
MIRRORED = ("celeba_attributes", "imagenet_resnet50", "mnist_autoencoder")
IN_CHECK = [(n, "mirrored" if n in MIRRORED else "one_device") for n in SMALL if n != "digits"]
COMBINATIONS = [
    pytest.param(*combination, marks=[] if combination in IN_CHECK else [pytest.mark.long])
    for combination in itertools.product(SMALL, ["mirrored", "one_device"])
]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def pool(data_dir: str) -> Iterator[AnsweringPool]:
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    with AnsweringPool(Layout("horovod", 2), running.create_training, data_dir) as pool:
        yield pool


@pytest.mark.parametrize(("name", "strategy"), COMBINATIONS)
def test_two_steps(name: str, strategy: str, data_dir: str) -> None:
    devices = {"one_device": 1, "mirrored": 2}[strategy]
    assert running.has_finite_losses(running.two_steps(name, strategy, devices, data_dir))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", SMALL)
def test_two_steps_of_horovod(name: str, pool: AnsweringPool) -> None:
    answers = pool.ask(name)
    assert not [answer.error for answer in answers if answer.error]
    first, other = (answer.value for answer in answers)
    assert running.has_finite_losses(first)
    assert first == other
