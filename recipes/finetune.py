"""Fine-tunes a language model of KerasHub on your conversations, by default with LoRA.

Command:   python -m tfdist.train --recipe finetune --set preset=gemma3_1b --data chats.jsonl
           --set lora_rank=8 --strategy sharded --export adapter,safetensors
           --data FOLDER reads all JSON Lines or Parquet files in it. A row has `messages` with
           `role` and `content`, `conversations` with `from` and `value`, `prompt` and
           `completion`, or a `text`. Only what the assistant says is learned.
Try it:    ... --set preset=tiny --data small: an untrained network, on Python's help
Hardware:  GPUs; two CPU cores for `tiny`
"""

from __future__ import annotations

import functools
import importlib
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import Field

import pipelines
import tfdist
from pipelines.maps import text
from recipes import _settings
from tfdist import data, optimizers, schedules, train
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError, DataError, MissingError
from tfdist.upstream.keras_layers import separate_segments

DEFAULTS: Mapping[str, Any] = {
    "epochs": 3,
    "batch_size": 8,
    "optimizer": "adamw",
    "learning_rate": 2e-4,
    "lr_rule": "cosine",
    "precision": "bfloat16",
    "checkpoint_frozen": False,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {
    "data": data.SMALL,
    "batch_size": 4,
    "set": {"preset": "tiny", "length": 64},
}

_NTH = 20  # every n-th conversation is held out, unless there is a split for it
_SHUFFLED_ROWS, _NUM_SAMPLES = 10_000, 3

#: The texts before and after each message, by a token that only tokenizers of the family have.
_TEMPLATES = {
    "<|start_header_id|>": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "<start_of_turn>": ("<start_of_turn>{role}\n", "<end_of_turn>\n"),
    "<|im_start|>": ("<|im_start|>{role}\n", "<|im_end|>\n"),
}
#: Names of columns with the roles and the texts of a conversation, and the fields of a pair.
_MESSAGES = (("messages.role", "messages.content"), ("conversations.from", "conversations.value"))
_PAIRS = (("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
_TEXT = "text"  # the role of a text that is no conversation
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}

#: Who says each message, and what.
Conversation = tuple[list[str], list[str]]


class Hyperparameters(_settings.TextSettings):
    """Hyperparameters, which `--set NAME=VALUE` sets."""

    preset: str = "tiny"  # of KerasHub: a name, a folder, or hf://USER/MODEL
    lora_rank: int = Field(8, ge=0)  # 0: all weights are trained
    quantize: Literal["none", "int8", "int4"] = "none"  # of the frozen weights
    length: int = Field(512, ge=2)  # tokens per row; longer conversations are cut
    pack: bool = False  # several conversations in a row, which do not see each other
    begin: str | None = None  # text before each message, with {role}; default: by the tokenizer
    end: str | None = None  # text after each message
    learned: str = "assistant"  # the role whose messages are learned


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled task; its loss is in nats per learned token."""
    hp = Hyperparameters.model_validate(config.set)
    models = _hub().models
    if hp.preset == "tiny":
        backbone = models.Llama3Backbone(
            vocabulary_size=_tokenizer("tiny").vocabulary_size(), num_layers=2, hidden_dim=64,
            intermediate_dim=128, num_query_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        task = models.Llama3CausalLM(backbone, _tiny_preprocessor(), compile=False)
    else:
        task = _from_preset(models.CausalLM, hp.preset, compile=False)
    task.preprocessor.sequence_length = hp.length
    if hp.pack and not separate_segments(task.backbone):
        raise ConfigurationError(
            f"--set pack=true: {type(task.backbone).__name__} has absolute positions, or its "
            "attention is unknown. Use a model with rotary positions, such as Llama, or pack=false."
        )
    if hp.quantize != "none":
        task.backbone.quantize(hp.quantize)
    if hp.lora_rank:
        task.backbone.enable_lora(hp.lora_rank)
    elif hp.quantize != "none":
        raise ConfigurationError("quantize= freezes the weights: set lora_rank to at least 1.")
    rate = schedules.learning_rate(config, steps_per_epoch)
    return _compiled(task, config, optimizers.create(config, rate))


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches of tokens, the next tokens, and their weights.

    Tokens are a dictionary of `token_ids` and `padding_mask`; all are `(batch, length)`.
    """
    rows = _rows(config, "train").shuffle(_SHUFFLED_ROWS, config.seed)
    return rows.batch(config.batch_size)


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns the held-out conversations as `train_data` does, in a fixed order."""
    return _rows(config, "validation").batch(config.batch_size)


def prepare(config: TrainConfig, model: keras.Model) -> None:
    """Compiles a task that was loaded, which has KerasHub's own loss, for its evaluation."""
    _compiled(model, config, model.optimizer)


def report(config: TrainConfig, model: keras.Model, folder: Path) -> list[str]:
    """Writes and draws answers of the model to held-out prompts, with its perplexity."""
    task = _compiled(model, config, None)
    results = task.evaluate(validation_data(config).take(20), verbose=0, return_dict=True)
    lines = [f"perplexity of held-out answers: {results['perplexity']:.4g}"]
    hp, (begin, end) = Hyperparameters.model_validate(config.set), _template(config)
    for roles, texts in _conversations(config)["validation"][:_NUM_SAMPLES]:
        num = roles.index(hp.learned) if hp.learned in roles else 0
        turns = list(zip(roles, texts, strict=True))[:num]
        said = [f"{begin.replace('{role}', role)}{one}{end}" for role, one in turns]
        prompt = "".join([*said, begin.replace("{role}", hp.learned)]) if num else texts[0][:20]
        lines += ["", task.generate(prompt, max_length=hp.length)]
    (folder / "samples.txt").write_text("\n".join(lines) + "\n", "utf-8")
    wrapped = [
        textwrap.wrap(line, 100)[:4] or [""] for one in lines for line in one.splitlines() or [""]
    ]
    _draw([line for part in wrapped for line in part], folder / "samples.png")
    return ["samples.png", "samples.txt"]


def _draw(lines: Sequence[str], path: Path) -> None:
    figure = Figure(figsize=(9, 0.8 + 0.2 * len(lines)))
    FigureCanvasAgg(figure)
    escaped = "\n".join(lines).replace("$", r"\$")
    figure.text(0.03, 0.97, escaped, va="top", family="monospace", fontsize=9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font has no letters of Asia
        figure.savefig(path, dpi=100)


# ---- the model ----


def _hub() -> Any:
    try:
        return importlib.import_module("keras_hub")
    except ImportError as error:
        raise MissingError(f'pip install "tfdist[hub]" ({error}).') from None


def _from_preset(kind: Any, preset: str, **options: Any) -> Any:
    try:
        return kind.from_preset(preset, **options)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"--set preset={preset}: {error}") from error


def _compiled(task: Any, config: TrainConfig, optimizer: Any) -> Any:
    """Compiles a task for batches of tokens: `generate` alone uses its preprocessor."""
    task.preprocess_samples = keras.utils.pack_x_y_sample_weight
    task.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=[_hub().metrics.Perplexity(from_logits=True, name="perplexity")],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
        sampler="greedy",
    )
    return task


@functools.lru_cache(maxsize=2)
def _tokenizer(preset: str) -> Any:
    if preset == "tiny":
        return _tiny_preprocessor().tokenizer
    return _from_preset(_hub().models.Tokenizer, preset)


def _tiny_preprocessor() -> Any:
    """Returns a preprocessor whose tokens are bytes, spelled as GPT-2 does."""
    models = _hub().models
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(b if b in visible else next(others)) for b in range(256)]
    special = [
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>",
    ]  # fmt: skip
    tokens = [*special, *letters, "th"]
    tokenizer = models.Llama3Tokenizer({token: i for i, token in enumerate(tokens)}, ["t h"])
    return models.Llama3CausalLMPreprocessor(tokenizer)


# ---- the conversations ----


def _rows(config: TrainConfig, split: str) -> tf.data.Dataset:
    """Returns rows of tokens, the next tokens, and whether they are learned."""
    hp = Hyperparameters.model_validate(config.set)
    if config.data == data.SYNTHETIC:
        raise DataError("--data synthetic: conversations are not noise. Use --data small.")
    tokenizer, (begin, end) = _tokenizer(hp.preset), _template(config)
    first = [t for t in [getattr(tokenizer, "start_token_id", None)] if t is not None]
    last = [t for t in [getattr(tokenizer, "end_token_id", None)] if t is not None]

    def example(roles: tf.Tensor, texts: tf.Tensor) -> Any:
        tokens, weights = text.conversation(
            roles, texts, lambda said: tf.cast(tokenizer(said), tf.int32),
            begin=begin, end=end, learned=learned,
        )  # fmt: skip
        tokens = tf.concat([first, tokens, last], 0)
        return tokens, tf.concat([tf.zeros(len(first)), weights, tf.ones(len(last))], 0)

    def padded(tokens: tf.Tensor, weights: tf.Tensor) -> Any:
        size = hp.length + 1
        columns = (v[:size] for v in (tokens, tf.ones_like(tokens), weights))
        columns = (tf.pad(v, [[0, size - tf.size(v)]]) for v in columns)
        tokens, mask, weights = (tf.ensure_shape(v, [size]) for v in columns)
        return {"token_ids": tokens[:-1], "padding_mask": mask[:-1]}, tokens[1:], weights[1:]

    def packed(x: dict[str, tf.Tensor], y: tf.Tensor, weights: tf.Tensor) -> Any:
        return {"token_ids": x["token_ids"], "padding_mask": x["segment_ids"]}, y, weights

    learned = _TEXT if _conversations(config)["train"][0][0] == [_TEXT] else hp.learned
    roles, texts = zip(*_conversations(config)[split], strict=True)
    pairs = (tf.ragged.constant(part, dtype=tf.string) for part in (roles, texts))
    examples = tf.data.Dataset.from_tensor_slices(tuple(pairs)).map(example, tf.data.AUTOTUNE)
    if not hp.pack:
        return examples.map(padded)
    rows = text.pack_examples(examples, hp.length).map(packed)
    return rows.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in rows)))


def _template(config: TrainConfig) -> tuple[str, str]:
    """Returns the texts before and after each message."""
    hp = Hyperparameters.model_validate(config.set)
    if _conversations(config)["train"][0][0] == [_TEXT]:
        return hp.begin or "", hp.end or ""
    vocabulary = set(_tokenizer(hp.preset).get_vocabulary())
    begin, end = next(
        (texts for token, texts in _TEMPLATES.items() if token in vocabulary), ("{role}: ", "\n")
    )
    return begin if hp.begin is None else hp.begin, end if hp.end is None else hp.end


def _conversations(config: TrainConfig) -> Mapping[str, list[Conversation]]:
    hp = Hyperparameters.model_validate(config.set)
    if config.data is None:
        raise ConfigurationError(
            "--data: expected JSON Lines or Parquet of conversations. To try it, use --data small."
        )
    return _read(str(config.data), hp.encoding, hp.splits)


@functools.lru_cache(maxsize=2)
def _read(location: str, encoding: str | None, splits: str | None) -> Mapping[str, Any]:
    """Returns the conversations of the splits `train` and `validation`."""
    if location == data.SMALL:
        parts = {"train": _topics()}
    else:
        try:
            rows, account = pipelines.read_table(location, encoding=encoding, splits=splits)
        except pipelines.DataError as error:
            raise DataError(_settings.in_settings(str(error))) from None
        if tfdist.is_chief():
            print(account)
        parts = {name: _of_table(location, one.table) for name, one in rows.items()}
    everything = parts["train"]
    held_out = parts.get("validation", parts.get("test"))
    if held_out is None:
        nth = min(_NTH, len(everything))
        held_out = everything[nth - 1 :: nth]
        everything = [one for i, one in enumerate(everything) if i % nth != nth - 1]
    if not everything or not held_out:
        raise DataError(f"--data {location}: expected at least 2 conversations.")
    return {"train": everything, "validation": held_out}


def _of_table(location: str, table: Any) -> list[Conversation]:
    """Returns the conversations of a table that are not empty."""
    names = set(table.column_names)
    if columns := next((pair for pair in _MESSAGES if names.issuperset(pair)), None):
        pairs = zip(*(table[name].to_pylist() for name in columns), strict=True)
        return [
            ([_ROLES.get(role, role) for role in roles], [said or "" for said in texts])
            for roles, texts in pairs
            if roles
        ]
    if columns := next((pair for pair in _PAIRS if names.issuperset(pair)), None):
        pairs = zip(*(table[name].to_pylist() for name in columns), strict=True)
        return [(["user", "assistant"], [str(one), str(other)]) for one, other in pairs]
    if "text" in names:
        return [([_TEXT], [said]) for said in table["text"].to_pylist() if said]
    raise DataError(
        f"--data {location}: expected a column messages (with role and content), conversations "
        f"(from, value), prompt and completion, or text; columns: {', '.join(table.column_names)}."
    )


def _topics() -> list[Conversation]:
    """Returns questions about Python, with the beginning of its help as answers."""
    from pydoc_data.topics import topics

    return [
        (["user", "assistant"], [f"What is {name}?", " ".join(topics[name].split())[:200]])
        for name in sorted(topics)
    ]


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
