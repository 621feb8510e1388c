"""Models of KerasHub train as in plain Keras, with what was done to them before."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import keras
import numpy as np
import pytest

import tfdist
from recipes import finetune
from tests.support.commands import needs_horovod
from tfdist import strategies
from tfdist.config import TrainConfig
from tfdist.run import recipe, saved_model
from tfdist.trainer import Trainer
from tfdist.upstream.keras_layers import separate_segments
from tfdist.upstream.weight_files import FileArray

pytest.importorskip("keras_hub")

from tests.support import hub


class Case(NamedTuple):
    """A model and what is done to its backbone."""

    family: str
    dtype: str | None = None
    quantized: str | None = None
    lora: int = 0

    def __str__(self) -> str:
        return "-".join(str(part) for part in self if part)


#: Quantized models round in each step: a sum in another order may change a number by one part.
CASES = {
    Case("bert"): 1e-5,
    Case("gpt2", quantized="int8", lora=4): 1e-4,
    Case("llama", dtype="bfloat16", lora=4): 1e-3,
    Case("gemma", quantized="int4", lora=4): 1e-4,
    Case("gpt2"): 1e-5,
    Case("llama", dtype="bfloat16", quantized="int8", lora=4): 1e-3,
    Case("gemma", lora=2): 1e-5,
    Case("gpt2", quantized="float8"): 1e-4,
    Case("bert", lora=2): 1e-5,
}

STRATEGIES = ("mirrored", "sharded", "tensor_parallel", "pipeline")
#: Over two processes, by the mesh.
OVER_PROCESSES = {
    "shard=2": [
        Case("gpt2", quantized="int8", lora=4),
        Case("llama", dtype="bfloat16", lora=4),
        Case("gpt2", quantized="float8"),
    ],
    "data=2,shard=2": [Case("gemma", quantized="int4", lora=4)],
    "data=2,tensor=2": [Case("bert", lora=2), Case("llama", dtype="bfloat16", lora=4)],
    "data=2,pipeline=2": [Case("gpt2", quantized="float8")],
}


def build(case: Case) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = hub.model(case.family, case.dtype)
    if case.quantized:
        model.backbone.quantize(case.quantized)
    if case.lora:
        model.backbone.enable_lora(case.lora)
    optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-2)
    if case.family == "bert":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    else:
        model.compile(optimizer, sampler="greedy")
    return model


def train(trainer: Any, case: Case) -> list[float]:
    data = [np.array(hub.TEXTS), hub.labels()] if case.family == "bert" else [np.array(hub.TEXTS)]
    history = trainer.fit(*data, batch_size=4, epochs=2, verbose=0, shuffle=False)
    return history.history["loss"]


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (Case("bert"), "mirrored"),
        *(
            pytest.param(case, strategy, marks=pytest.mark.long)
            for case in CASES
            for strategy in STRATEGIES
        ),
    ],
    ids=str,
)
def test_trains_as_in_keras(case: Case, strategy: str) -> None:
    plain = build(case)
    expected = train(plain, case)
    trainer = Trainer(build(case), strategy=strategy, devices=2)
    losses = train(trainer, case)
    tolerance = CASES[case]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=tolerance)
    assert type(trainer.model) is type(plain)
    assert len(trainer.model.trainable_variables) == len(plain.trainable_variables)
    if case == Case("llama", dtype="bfloat16", lora=4):
        assert trainer.model.generate("the", max_length=8) == plain.generate("the", max_length=8)


def losses_over_processes(mesh: str) -> list[list[float]]:
    strategy = strategies.create(None, mesh=mesh)
    return [train(Trainer(build(case), strategy), case) for case in OVER_PROCESSES[mesh]]


@needs_horovod
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("mesh", OVER_PROCESSES)
def test_trains_as_in_keras_over_processes(mesh: str) -> None:
    losses = tfdist.notebook_launch(losses_over_processes, num_workers=2, args=(mesh,))
    for case, trained in zip(OVER_PROCESSES[mesh], losses, strict=True):
        expected = train(build(case), case)
        np.testing.assert_allclose(trained, expected, rtol=0, atol=CASES[case], err_msg=str(case))


@pytest.mark.long
def test_seeding_leaves_the_vocabulary() -> None:
    case = Case("llama")
    trainers = [Trainer(build(case), strategy="mirrored", devices=2) for _ in range(2)]
    assert train(trainers[0], case) == train(trainers[1], case)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma", marks=pytest.mark.long)])
def test_segments_of_a_packed_row_do_not_see_each_other(family: str) -> None:
    assert not separate_segments(hub.causal_lm("gpt2").backbone)  # absolute positions
    backbone = hub.causal_lm(family).backbone
    assert separate_segments(backbone)
    ids = np.arange(5, 12)[None]
    packed = backbone({"token_ids": ids, "padding_mask": np.array([[1, 1, 1, 2, 2, 2, 0]])})
    for part in (slice(0, 3), slice(3, 6)):
        one = ids[:, part]
        alone = backbone({"token_ids": one, "padding_mask": np.ones_like(one)})
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_rows_train_as_in_keras(strategy: str) -> None:
    settings = {"preset": "tiny", "length": 64, "pack": True, "lora_rank": 2}
    config = TrainConfig(**{**finetune.DEFAULTS, "data": "small", "batch_size": 4, "set": settings})
    rows = finetune.train_data(config).take(3).cache()

    def task() -> keras.Model:
        keras.utils.set_random_seed(1)
        return finetune.build_model(config, 3)

    expected = task().fit(rows, verbose=0).history["loss"]
    losses = Trainer(task, strategy=strategy, devices=2).fit(rows, verbose=0).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_saved_task_is_evaluated_with_the_loss_of_the_recipe(tmp_path: Path) -> None:
    settings = {"preset": "tiny", "length": 16}
    config = TrainConfig(**{**finetune.DEFAULTS, "data": "small", "set": settings})
    data = finetune.validation_data(config).take(1)
    task = finetune.build_model(config, 4)
    task.save(tmp_path / "model.keras")
    loaded = saved_model.load(str(tmp_path / "model.keras"))
    recipe.prepare(finetune, config, loaded)
    results, expected = (one.evaluate(data, verbose=0, return_dict=True) for one in (loaded, task))
    assert results == pytest.approx(expected, rel=1e-5)
    assert "perplexity" in results


@pytest.mark.long
@pytest.mark.parametrize("form", ["preset", "safetensors"])
def test_presets_are_read_in_pieces(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**finetune.DEFAULTS, "set": {"preset": "tiny", "length": 16}}
    import keras_hub

    finetune.build_model(TrainConfig(**options), 4).save(tmp_path / "model.keras")
    saved_model.export([form], tmp_path / "model.keras")
    elements = Mock(side_effect=FileArray.elements, autospec=True)
    monkeypatch.setattr(FileArray, "elements", lambda *args: elements(*args))

    def load() -> keras.Model:
        task = keras_hub.models.CausalLM.from_preset(str(tmp_path / form), compile=False)
        task.compile(keras.optimizers.Adam())
        return task

    loaded, plain = Trainer(load, strategy="sharded", devices=2).model, load()
    large = [v for v in plain.variables if v.shape.num_elements() >= 1024]
    assert elements.call_count >= 2 * len(large) > 10
    for one, other in zip(loaded.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)


@pytest.mark.long
def test_exported_safetensors_compute_the_same_in_transformers(tmp_path: Path) -> None:
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    options: dict[str, Any] = {**finetune.DEFAULTS, "set": {"preset": "tiny", "length": 16}}
    task = finetune.build_model(TrainConfig(**options), 4)
    for weight in task.trainable_variables:
        weight.assign(weight + 0.05)
    task.save(tmp_path / "model.keras")
    saved_model.export(["safetensors"], tmp_path / "model.keras")
    ids = np.arange(5, 13)[None]
    expected = task({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "safetensors")
    logits = other(torch.tensor(ids)).logits.detach().numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)
