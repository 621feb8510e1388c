"""Tiny presets of KerasHub, compared with plain Keras on one device.

Most of its models compute attention, norms and rotary embeddings in float32 whatever the dtype of
Keras, so that float64 would measure rounding: they are compared in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses

import tfdist
from tests.conformance.results import compare
from tests.programs import engines
from tests.programs.engines import assert_equals_one_device
from tests.programs.program import TOLERANCE, Program, unregistered
from tests.programs.rows import integers, normal
from tests.support.data import Data
from tfdist.patches import attention
from tfdist.upstream.tensorflow_graphs import LOOPS

keras_hub = pytest.importorskip("keras_hub")
models = keras_hub.models

NUM_WORDS, LENGTH, NUM_CLASSES = 11, 6, 3
of_logits = partial(losses.SparseCategoricalCrossentropy, from_logits=True)
#: Sizes of the models that read text.
TINY = {"vocabulary_size": NUM_WORDS, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 12}
HEADS = TINY | {"num_heads": 2, "max_sequence_length": LENGTH}
GROUPED_HEADS = TINY | {"num_query_heads": 4, "num_key_value_heads": 2}
EXPERTS = GROUPED_HEADS | {"num_experts": 3, "top_k": 2}
GEMMA = GROUPED_HEADS | {"head_dim": 4}
WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 3}
GEMMA_2 = GEMMA | WINDOW | {
    "use_post_ffw_norm": True, "use_post_attention_norm": True,
    "attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0,
}  # fmt: skip
GEMMA_3 = GEMMA | WINDOW | {"image_size": None, "vision_encoder": None}
FULL = {"layer_types": ["full_attention"]}
QWEN_3_5 = GROUPED_HEADS | FULL | {"head_dim": 8, "partial_rotary_factor": 0.5}
GEMMA_4 = GEMMA_3 | {
    "num_layers": 3, "num_global_key_value_heads": 1, "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "attention_logit_soft_cap": 50.0,
}  # fmt: skip
SMOL = TINY | FULL | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False,
    "attention_dropout": 0.1,  # KerasHub does not read it
    "rope_layer_enabled_list": [True], "rope_theta": 1e4, "partial_rotary_factor": 1.0,
    "mlp_bias": False, "layer_norm_epsilon": 1e-6, "max_position_embeddings": LENGTH,
}  # fmt: skip
SHARED_EXPERT = {"moe_intermediate_dim": 6, "shared_expert_intermediate_dim": 8}

#: Rows of different lengths.
MASK = (np.arange(LENGTH) < integers(LENGTH + 1, low=2, seed=3)[:, None]).astype("int32")
TOKENS = {"token_ids": integers(NUM_WORDS, LENGTH, low=1), "padding_mask": MASK}
SEGMENTS = TOKENS | {"segment_ids": integers(2, LENGTH, seed=4)}

Case = tuple[Callable[[], keras.Model], Data]


def _task(kind: str, backbone: Callable[[], keras.Model], data: Data, *args: Any) -> Case:
    """A task whose outputs are logits of classes."""

    def build() -> keras.Model:
        model = getattr(models, kind)(backbone(), *args, preprocessor=None)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        model.compile(keras.optimizers.SGD(0.1), of_logits(), weighted_metrics=[accuracy])
        return model

    return build, data


def _backbone(name: str, config: dict[str, Any]) -> keras.Model:
    return getattr(models, f"{name}Backbone")(**config)


def causal_lm(name: str, config: dict[str, Any]) -> Case:
    """A language model that predicts the next word; padding counts nothing."""
    data = Data(TOKENS, integers(NUM_WORDS, LENGTH, seed=5), MASK.astype("float32"))
    return _task(f"{name}CausalLM", partial(_backbone, name, config), data)


def classifier(name: str, config: dict[str, Any], x: Any = SEGMENTS) -> Case:
    """A classifier of texts."""
    data = Data(x, integers(NUM_CLASSES, seed=5))
    return _task(f"{name}TextClassifier", partial(_backbone, name, config), data, NUM_CLASSES)


def masked_lm(name: str, config: dict[str, Any], x: Any = SEGMENTS) -> Case:
    """A language model that predicts two masked words of each row, or one."""
    x = x | {"mask_positions": integers(LENGTH, 2, seed=7)}
    weight = np.stack([np.ones(len(MASK)), integers(2, seed=8)], axis=1).astype("float32")
    data = Data(x, integers(NUM_WORDS, 2, seed=6), weight)
    return _task(f"{name}MaskedLM", partial(_backbone, name, config), data)


def _resnet(size: int) -> keras.Model:
    return models.ResNetBackbone(
        input_conv_filters=[64], input_conv_kernel_sizes=[3], stackwise_num_filters=[64, 64, 64],
        stackwise_num_blocks=[1, 1, 1], stackwise_num_strides=[1, 2, 2], block_type="basic_block",
        image_shape=(size, size, 3),
    )  # fmt: skip


def _vit(size: int) -> keras.Model:
    return models.ViTBackbone(
        image_shape=(size, size, 3), patch_size=size // 2, num_layers=1, num_heads=2,
        hidden_dim=8, mlp_dim=12,
    )  # fmt: skip


def image_classifier(name: str, backbone: Callable[[int], keras.Model]) -> Case:
    """A classifier of images."""
    data = Data(normal(16, 16, 3).astype("float32"), integers(NUM_CLASSES, seed=5))
    return _task(f"{name}ImageClassifier", partial(backbone, 16), data, NUM_CLASSES)


def image_segmenter() -> Case:
    """A SegFormer, with a class for each pixel."""

    def build() -> keras.Model:
        encoder = models.MiTBackbone(
            layerwise_depths=[1, 1], num_layers=2, layerwise_num_heads=[1, 2],
            layerwise_sr_ratios=[2, 1], max_drop_path_rate=0.1, layerwise_patch_sizes=[7, 3],
            layerwise_strides=[4, 2], image_shape=(32, 32, 3), hidden_dims=[4, 8],
        )  # fmt: skip
        backbone = models.SegFormerBackbone(encoder, projection_filters=8)
        model = models.SegFormerImageSegmenter(backbone, NUM_CLASSES)
        model.compile(keras.optimizers.SGD(0.1), of_logits(), metrics=[])
        return model

    return build, Data(normal(32, 32, 3).astype("float32"), integers(NUM_CLASSES, 32, 32, seed=5))


def object_detector() -> Case:
    """A RetinaNet: `compute_loss` matches boxes to anchors and divides by the matches."""

    def build() -> keras.Model:
        backbone = models.RetinaNetBackbone(_resnet(32), 3, 4, False, image_shape=(32, 32, 3))
        model = models.RetinaNetObjectDetector(backbone, NUM_CLASSES, pre_logits_num_conv_layers=1)
        focal = losses.BinaryFocalCrossentropy(from_logits=True, reduction="sum")
        model.compile(keras.optimizers.SGD(0.001), losses.Huber(reduction="sum"), focal)
        return model

    corner = np.abs(normal(2, 2, seed=6)) * 4
    boxes = np.concatenate([corner, corner + 6 + np.abs(normal(2, 2, seed=7)) * 4], axis=-1)
    y = {"boxes": boxes.astype("float32"), "labels": integers(NUM_CLASSES, 2).astype("float32")}
    return build, Data(normal(32, 32, 3).astype("float32"), y)


def text_layers() -> Case:
    """The layers that models of texts are made of, and the metric `Perplexity`."""
    hub = keras_hub.layers

    def build() -> keras.Model:
        tokens = keras.Input((LENGTH,), dtype="int32")
        words = hub.TokenAndPositionEmbedding(NUM_WORDS, LENGTH, 8, mask_zero=True)(tokens)
        x = hub.TransformerEncoder(12, 2)(words)
        x = hub.TransformerDecoder(12, 2)(x, words)
        layers = hub.FNetEncoder(12), hub.SinePositionEncoding(), hub.PositionEmbedding(LENGTH)
        x = keras.layers.add([layer(x) for layer in layers])
        x = hub.RMSNormalization(8)(hub.RotaryEmbedding()(x))
        x = hub.CachedMultiHeadAttention(2, 4)(x, x)
        bias = hub.AlibiBias()(keras.ops.einsum("bih,bjh->bij", x, x)[:, None])
        x = keras.ops.matmul(keras.ops.softmax(bias[:, 0]), x)
        table = hub.ReversibleEmbedding(NUM_WORDS, 8)
        x = x + table(tokens)
        masked = hub.MaskedLMHead(token_embedding=table)(x, keras.ops.abs(tokens) % LENGTH)
        model = keras.Model(tokens, table(x, reverse=True) + masked)
        perplexity = keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=0)
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-2), of_logits(), metrics=[perplexity])
        return model

    return build, Data(TOKENS["token_ids"], integers(NUM_WORDS, LENGTH, seed=5))


CASES: dict[str, Case] = {
    "GPT-2": causal_lm("GPT2", HEADS),
    "Gemma": causal_lm("Gemma", GEMMA),
    "Gemma 2": causal_lm("Gemma", GEMMA_2),
    "Llama": causal_lm("Llama", GROUPED_HEADS),
    "Mixtral": causal_lm("Mixtral", EXPERTS),
    "Qwen MoE": causal_lm("QwenMoe", EXPERTS | SHARED_EXPERT),
    "BERT, classes": classifier("Bert", HEADS),
    "DeBERTa, classes": classifier("DebertaV3", HEADS | {"bucket_size": 4}, TOKENS),
    "BERT, masked words": masked_lm("Bert", HEADS | {"dropout": 0.0}),
    "ALBERT, masked words": masked_lm("Albert", HEADS | {"embedding_dim": 4}),
    "ResNet": image_classifier("ResNet", _resnet),
    "ViT": image_classifier("ViT", _vit),
    "SegFormer": image_segmenter(),
    "RetinaNet": object_detector(),
    "layers of texts": text_layers(),
}


def _program(name: str) -> Program:
    build, data = CASES[name]
    # ResNet computes everything in the dtype of Keras.
    floatx, tolerance = ("float64", TOLERANCE) if name == "ResNet" else ("float32", 1.0)
    return unregistered(
        build, data, floatx=floatx, tolerance=tolerance, epochs=1, sync_batch_norm=True
    )


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str) -> None:
    assert_equals_one_device(_program(name))


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["pipeline", "pipeline zb", "tensor_parallel", "sharded parameters"]
)
@pytest.mark.parametrize("name", ["Gemma", "Llama", "BERT, masked words"])
def test_split_model_equals_one_device(name: str, strategy: str) -> None:
    """Their first layer, the table of words, is also the last one."""
    program = _program(name)
    assert not compare(engines.tfdist(program, strategy, 2), engines.plain(program), program)


#: Decoders by name, and whether a layer of theirs attends in chunks without `dropout`.
DECODERS = {
    "GPT2": (HEADS | {"dropout": 0.0}, True),
    "GPTNeoX": (HEADS | {"dropout": 0.0, "rotary_percentage": 1.0}, True),
    "Gemma": (GEMMA, True),
    "Gemma, a window": (GEMMA_2, True),
    "Gemma3": (GEMMA_3, True),
    "Gemma4": (GEMMA_3, True),
    "Gemma4, shared keys": (GEMMA_4, True),
    "Llama": (GROUPED_HEADS, True),
    "Mistral": (GROUPED_HEADS | {"sliding_window": 3}, True),
    "Mixtral": (EXPERTS, True),
    "Phi3": (GROUPED_HEADS, True),
    "Qwen": (GROUPED_HEADS | WINDOW, True),
    "QwenMoe": (EXPERTS | SHARED_EXPERT | WINDOW, True),
    "Qwen3": (GEMMA | {"sliding_window_size": 3}, True),
    "Qwen3Moe": (EXPERTS | {"head_dim": 4, "moe_intermediate_dim": 6}, True),
    "Qwen3_5": (QWEN_3_5, True),
    "SmolLM3": (SMOL, True),
    "GptOss": (EXPERTS | {"head_dim": 4, "sliding_window": 3}, False),
    "Bloom": (TINY | {"num_heads": 2}, False),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DECODERS)
def test_attention_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CHUNK", 4)
    monkeypatch.setattr(attention, "_LEAST_SCORES", 1)
    config, is_chunked = DECODERS[name]
    keras.utils.set_random_seed(0)
    model = _backbone(name.partition(",")[0], config)
    values = TOKENS | {"position_ids": np.tile(np.arange(LENGTH), (len(MASK), 1))}
    inputs = {key: tf.constant(values[key]) for key in model.input}

    def results(in_chunks: bool) -> list[tf.Tensor]:
        @tf.function
        def compute() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                output = model(inputs, training=True)
                loss = tf.reduce_sum(tf.sin(tf.cast(output, "float32")))
            weights = [variable.value for variable in model.trainable_variables]
            gradients = tape.gradient(loss, weights)
            # A table of words that only makes logits has no gradient here.
            return [output, *(tf.convert_to_tensor(g) for g in gradients if g is not None)]

        with attention.attention_in_chunks() if in_chunks else nullcontext():
            graph = compute.get_concrete_function().graph
            kinds = {operation.type for operation in graph.get_operations()}
        assert kinds.isdisjoint(LOOPS) is not (in_chunks and is_chunked)
        return compute()

    for one, other in zip(results(False), results(True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.long
def test_masks_of_all_layers_are_not_held_at_once() -> None:
    tokens = np.ones((2, 512), "int32")

    def planned(num_layers: int) -> int:
        build, _ = causal_lm("Llama", GROUPED_HEADS | {"num_layers": num_layers})
        trainer = tfdist.Trainer(build, strategy="one_device", remat="all")
        return trainer.plan(dict.fromkeys(TOKENS, tokens), tokens, batch_size=2)[0].activations

    assert planned(3) - planned(1) < tokens.size * 512  # a byte for each query and key


@pytest.mark.long
def test_trained_model_is_quantized_as_in_keras() -> None:
    """The model of a Trainer predicts in int8 what the same weights predict in plain Keras."""
    program = _program("GPT-2")
    trainer = tfdist.Trainer(program.build, strategy="mirrored", devices=2)
    data = program.data
    trainer.fit(data.x, data.y, sample_weight=data.sample_weight, batch_size=5, verbose=0)
    plain = program.build()
    plain.set_weights(trainer.model.get_weights())
    for model in (plain, trainer.model):
        model.quantize("int8")
    expected = plain.predict(data.x, batch_size=4, verbose=0)
    np.testing.assert_array_equal(trainer.model.predict(data.x, batch_size=4, verbose=0), expected)
    predicted = trainer.predict(data.x, batch_size=4, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
