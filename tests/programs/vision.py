"""Programs for images."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import integers, named, normal, pictures
from tests.support.case import compiled
from tests.support.data import Data


def of_classes() -> keras.losses.Loss:
    """Returns a cross-entropy of logits, created here because it keeps the current dtype."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(inputs: Any, features: Any, optimizer: str | Any = "adam") -> keras.Model:
    """Returns a classifier of three classes from features [rows, n]."""
    model = keras.Model(inputs, layers.Dense(3)(features))
    return compiled(model, optimizer, of_classes(), metrics=["accuracy"])


def encoder(tokens: Any, width: int = 4, blocks: int = 1) -> Any:
    """Applies transformer blocks with pre-normalization."""
    for _ in range(blocks):
        normed = layers.LayerNormalization(epsilon=1e-6)(tokens)
        tokens = layers.Add()([layers.MultiHeadAttention(2, 2)(normed, normed), tokens])
        normed = layers.LayerNormalization(epsilon=1e-6)(tokens)
        hidden = layers.Dense(2 * width, activation="gelu")(normed)
        tokens = layers.Add()([layers.Dense(width)(hidden), tokens])
    return tokens


class Patches(layers.Layer):
    """Splits an image into patches, embeds them and adds positions by constant indices."""

    def __init__(self, size: int = 4, width: int = 4) -> None:
        super().__init__()
        self.size, self.num = size, (8 // size) ** 2
        self.embed = layers.Dense(width)
        self.position = layers.Embedding(self.num, width)

    def call(self, images: Any) -> Any:
        patches = ops.image.extract_patches(images, self.size)
        patches = ops.reshape(patches, (-1, self.num, self.size * self.size))
        return self.embed(patches) + self.position(ops.arange(self.num))


@program(pictures(), quick=True)
def vision_transformer() -> keras.Model:
    """A vision transformer whose position embedding is looked up by `ops.arange`."""
    inputs = keras.Input((8, 8, 1))
    features = layers.Flatten()(encoder(Patches()(inputs)))
    return classifier(inputs, features, keras.optimizers.AdamW(1e-2, weight_decay=1e-2))


@program(pictures())
def mlp_mixer() -> keras.Model:
    """An MLP mixer: dense layers across patches, then across channels."""
    inputs = keras.Input((8, 8, 1))
    tokens = Patches()(inputs)
    across = layers.Dense(4, activation="gelu")(layers.Permute((2, 1))(tokens))
    tokens = tokens + layers.Permute((2, 1))(across)
    tokens = tokens + layers.Dense(4, activation="gelu")(layers.LayerNormalization()(tokens))
    return classifier(inputs, layers.GlobalAveragePooling1D()(tokens))


@program(pictures())
def external_attention() -> keras.Model:
    """External attention: two small memories shared by all images."""
    inputs = keras.Input((8, 8, 1))
    tokens = Patches()(inputs)
    scores = ops.softmax(layers.Dense(5, use_bias=False)(tokens), axis=1)
    scores = scores / (1e-9 + ops.sum(scores, axis=2, keepdims=True))
    tokens = layers.Dense(4, use_bias=False)(scores) + tokens
    return classifier(inputs, layers.GlobalAveragePooling1D()(tokens), "rmsprop")


@program(pictures(), sync_batch_norm=True, quick=True)
def conv_mixer() -> keras.Model:
    """A ConvMixer: depthwise and pointwise convolutions with `sync_batch_norm`."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 2, strides=2)(inputs)
    x = layers.BatchNormalization()(layers.Activation("gelu")(x))
    deep = layers.DepthwiseConv2D(3, padding="same", activation="gelu")(x)
    x = layers.Add()([layers.BatchNormalization()(deep), x])
    x = layers.BatchNormalization()(layers.Conv2D(4, 1, activation="gelu")(x))
    return classifier(inputs, layers.GlobalAveragePooling2D()(x))


@program(pictures(), sync_batch_norm=True)
def separable_residual_network() -> keras.Model:
    """Separable convolutions with residuals, as in Xception."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(layers.Rescaling(0.5)(inputs))
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    y = layers.SeparableConv2D(6, 3, padding="same")(x)
    y = layers.MaxPooling2D(3, strides=2, padding="same")(layers.BatchNormalization()(y))
    x = layers.add([y, layers.Conv2D(6, 1, strides=2, padding="same")(x)])
    return classifier(inputs, layers.GlobalAveragePooling2D()(x))


@program(pictures(), batch_size=5, epochs=1)
def convolutions_on_a_last_row() -> keras.Model:
    """Convolutions with relu, and a last batch of one row."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, activation="relu")(inputs)
    x = layers.Conv2D(8, 3, activation="relu")(layers.MaxPooling2D()(x))
    return classifier(inputs, layers.Flatten()(x))


@program(Data(normal(8, 8, 1), integers(3, 8, 8)), sync_batch_norm=True)
def u_net() -> keras.Model:
    """Segmentation with a U-Net: transposed convolutions and skip connections."""
    inputs = keras.Input((8, 8, 1))
    down = layers.Conv2D(4, 3, strides=2, padding="same")(inputs)
    down = layers.Activation("relu")(layers.BatchNormalization()(down))
    deep = layers.SeparableConv2D(4, 3, padding="same", activation="relu")(down)
    up = layers.Conv2DTranspose(4, 3, padding="same")(layers.concatenate([deep, down]))
    up = layers.UpSampling2D(2)(layers.BatchNormalization()(up))
    model = keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(up))
    return compiled(model, "rmsprop", of_classes(), metrics=["accuracy"])


@program(Data(normal(8, 8, 1), integers(3, 8, 8)))
def dilated_segmentation() -> keras.Model:
    """Segmentation with dilated convolutions and pooled context."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    pooled = layers.AveragePooling2D(4)(x)
    context = layers.UpSampling2D(4, interpolation="bilinear")(layers.Conv2D(2, 1)(pooled))
    dilated = [layers.Conv2D(2, 3, dilation_rate=d, padding="same")(x) for d in (1, 2)]
    model = keras.Model(inputs, layers.Conv2D(3, 1)(layers.concatenate([context, *dilated])))
    iou = keras.metrics.MeanIoU(3, sparse_y_pred=False, sparse_y_true=True)
    return compiled(model, "adam", of_classes(), metrics=[iou])


def _tower() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(3, 3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


@program(
    Data([normal(8, 8, 1), normal(8, 8, 1, seed=9)], integers(2, 1).astype("float64")), quick=True
)
def siamese_contrastive() -> keras.Model:
    """A Siamese network with a contrastive loss."""

    def contrastive(y: Any, distance: Any) -> Any:
        margin = ops.maximum(1.0 - distance, 0.0)
        return ops.mean((1 - y) * ops.square(distance) + y * ops.square(margin), axis=-1)

    one, other, tower = keras.Input((8, 8, 1)), keras.Input((8, 8, 1)), _tower()
    squares = ops.sum(ops.square(tower(one) - tower(other)), axis=1, keepdims=True)
    distance = ops.sqrt(ops.maximum(squares, keras.config.epsilon()))
    model = keras.Model([one, other], distance)
    return compiled(model, "rmsprop", contrastive, metrics=["accuracy"])


class Triplets(layers.Layer):
    """Adds the loss of three embeddings."""

    def call(self, inputs: Any) -> Any:
        """Maps three [rows, n] to the two distances [rows, 2]."""
        anchor, near, far = inputs
        close = ops.sum(ops.square(anchor - near), -1)
        apart = ops.sum(ops.square(anchor - far), -1)
        self.add_loss(ops.mean(ops.maximum(close - apart + 0.5, 0.0)))
        return ops.stack([close, apart], -1)


@program(Data([normal(8, 8, 1, seed=n) for n in (1, 2, 3)]))
def triplets() -> keras.Model:
    """A triplet loss that a layer adds, without labels."""
    inputs, tower = [keras.Input((8, 8, 1)) for _ in range(3)], _tower()
    model = keras.Model(inputs, Triplets()([tower(x) for x in inputs]))
    model.compile(keras.optimizers.Adam(1e-3))
    return model


def _batch_hard(labels: Any, embeddings: Any) -> Any:
    """Returns the loss of each row's hardest positive and negative in the batch."""
    squares = ops.sum(ops.square(embeddings), 1)
    distances = squares[:, None] - 2 * embeddings @ ops.transpose(embeddings) + squares[None]
    same = ops.cast(ops.reshape(labels, (-1, 1)) == ops.reshape(labels, (1, -1)), distances.dtype)
    hardest = ops.max(same * distances, 1)
    easiest = ops.min(distances + 1e3 * same, 1)
    return ops.maximum(hardest - easiest + 1.0, 0.0)


@program(pictures(), may_refuse=True)
def batch_hard_triplets() -> keras.Model:
    """A triplet loss over the hardest pairs within the batch."""
    return compiled(_tower(), "adam", _batch_hard)


@program(pictures(), may_refuse=True)
def metric_learning() -> keras.Model:
    """Metric learning: similarities between all rows of a batch as logits."""

    def similarity(labels: Any, embeddings: Any) -> Any:
        embeddings = ops.normalize(embeddings, axis=-1)
        logits = embeddings @ ops.transpose(embeddings) / 0.2
        same = ops.cast(ops.reshape(labels, (-1, 1)) == ops.reshape(labels, (1, -1)), logits.dtype)
        return keras.losses.categorical_crossentropy(same, logits, from_logits=True)

    return compiled(_tower(), "adam", similarity)


@program(pictures())
def squeeze_and_excite() -> keras.Model:
    """Squeeze-and-excitation after GroupNormalization."""
    inputs = keras.Input((8, 8, 1))
    x = layers.GroupNormalization(2)(layers.Conv2D(4, 3)(inputs))
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Dense(4, activation="sigmoid")(layers.Dense(2, activation="relu")(gate))
    return classifier(inputs, layers.GlobalMaxPooling2D()(layers.Multiply()([x, gate])))


class Involution(layers.Layer):
    """A kernel for every pixel, computed from that pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = layers.Conv2D(9, 1)

    def call(self, images: Any) -> Any:
        patches = ops.image.extract_patches(images, 3, strides=1, padding="same")
        return ops.sum(patches * self.kernel(images), -1, keepdims=True)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@program(pictures())
def involution() -> keras.Model:
    """An involution: a kernel per pixel, computed from that pixel."""
    inputs = keras.Input((8, 8, 1))
    x = layers.ReLU()(Involution()(layers.ReLU()(Involution()(inputs))))
    return classifier(inputs, layers.Flatten()(x))


class Window(layers.Layer):
    """Attention within shifted windows, with a table of biases by relative position."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(9, 1), initializer="glorot_uniform", name="table")
        self.qkv, self.out = layers.Dense(3 * shape[-1]), layers.Dense(shape[-1])
        places = np.stack(np.meshgrid(range(2), range(2), indexing="ij")).reshape(2, -1)
        relative = (places[:, :, None] - places[:, None]) + 1
        self.relative = (3 * relative[0] + relative[1]).reshape(-1)

    def call(self, x: Any) -> Any:
        channels = x.shape[-1]
        x = ops.roll(x, (-1, -1), (1, 2))
        x = ops.reshape(x, (-1, 2, 2, 2, 2, channels))
        x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, 4, channels))
        q, k, v = ops.split(self.qkv(x), 3, axis=-1)
        bias = ops.reshape(ops.take(self.table, self.relative, axis=0), (4, 4))
        x = self.out(ops.softmax(q @ ops.transpose(k, (0, 2, 1)) + bias) @ v)
        x = ops.transpose(ops.reshape(x, (-1, 2, 2, 2, 2, channels)), (0, 1, 3, 2, 4, 5))
        return ops.roll(ops.reshape(x, (-1, 4, 4, channels)), (1, 1), (1, 2))


@program(pictures(), quick=True)
def shifted_windows() -> keras.Model:
    """Swin: attention in shifted windows with relative position biases."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(3, 2, strides=2)(inputs)
    return classifier(inputs, layers.GlobalAveragePooling2D()(Window()(x) + x))


class ClassToken(layers.Layer):
    """Prepends a learned token."""

    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")

    def call(self, x: Any) -> Any:
        rows = ops.shape(x)[0]
        return ops.concatenate([ops.broadcast_to(self.token, (rows, 1, x.shape[-1])), x], 1)


@program(pictures())
def class_token() -> keras.Model:
    """A transformer with a class token and LayerScale."""
    inputs = keras.Input((8, 8, 1))
    tokens = encoder(ClassToken()(Patches()(inputs)))
    return classifier(inputs, tokens[:, 0], keras.optimizers.Lamb(1e-2))


@program(pictures())
def compact_transformer() -> keras.Model:
    """A compact convolutional transformer with sequence pooling."""
    inputs = keras.Input((8, 8, 1))
    x = layers.ZeroPadding2D(1)(layers.Conv2D(4, 3, strides=2, padding="same")(inputs))
    tokens = encoder(layers.Reshape((-1, 4))(layers.MaxPooling2D(2)(x)))
    weights = ops.softmax(layers.Dense(1)(tokens), axis=1)
    pooled = ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), tokens), -2)
    return classifier(inputs, pooled, "nadam")


@program(Data(normal(4, 4, 1), normal(8, 8, 1, seed=5)))
def super_resolution() -> keras.Model:
    """Sub-pixel convolution: channels turned into pixels by reshaping."""
    inputs = keras.Input((4, 4, 1))
    x = layers.Conv2D(4, 3, padding="same", kernel_initializer="orthogonal")(inputs)
    x = ops.reshape(layers.Conv2D(4, 3, padding="same")(layers.PReLU()(x)), (-1, 4, 4, 2, 2))
    x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4)), (-1, 8, 8, 1))
    psnr = keras.metrics.MeanMetricWrapper(lambda y, p: ops.mean(ops.abs(y - p), (1, 2, 3)), "l1")
    return compiled(keras.Model(inputs, x), "adam", "mse", metrics=[psnr])


@keras.saving.register_keras_serializable("tests.programs")
class Orthogonal(keras.regularizers.Regularizer):
    """Penalizes each row's matrix for its distance from an orthogonal one."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty, summed over the rows [rows, 9]."""
        x = ops.reshape(x, (-1, 3, 3))
        squares = ops.square(x @ ops.transpose(x, (0, 2, 1)) - ops.eye(3, dtype=x.dtype))
        return ops.sum(0.01 * squares)


@program(Data(normal(6, 3), integers(3)), sync_batch_norm=True, may_refuse=True)
def point_cloud() -> keras.Model:
    """PointNet, with an orthogonality regularizer of activities."""
    inputs = keras.Input((6, 3))
    x = layers.BatchNormalization(momentum=0.0)(layers.Conv1D(4, 1)(inputs))
    x = layers.GlobalMaxPooling1D()(layers.Activation("relu")(x))
    bias = keras.initializers.Constant(np.eye(3).flatten())
    x = layers.Dense(
        9, kernel_initializer="zeros", bias_initializer=bias, activity_regularizer=Orthogonal()
    )(x)
    x = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(x)])
    return classifier(inputs, layers.GlobalMaxPooling1D()(layers.Dense(4)(x)))


@program(Data(normal(8, 8, 1), {"box": np.abs(normal(4, seed=3)), "kind": integers(3)}), quick=True)
def boxes_and_kinds() -> keras.Model:
    """A detector with two heads: Huber loss of the box, weighted cross-entropy of the class."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Flatten()(layers.Conv2D(3, 3, strides=2, activation="relu")(inputs))
    heads = {"box": layers.Dense(4, name="box")(x), "kind": layers.Dense(3, name="kind")(x)}
    losses = {"box": keras.losses.Huber(), "kind": of_classes()}
    return compiled(
        keras.Model(inputs, heads), "adam", losses,
        loss_weights={"box": 2.0, "kind": 0.5}, metrics={"box": "mae", "kind": "accuracy"},
    )  # fmt: skip


@program(Data(normal(3, 4, 4, 1), normal(3, 4, 4, 1, seed=7)), epochs=1)
def next_frame() -> keras.Model:
    """Next-frame video prediction with convolutional LSTMs."""
    inputs = keras.Input((3, 4, 4, 1))
    x = layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True)(inputs)
    x = layers.Conv3D(1, 3, activation="sigmoid", padding="same")(layers.LayerNormalization()(x))
    return compiled(keras.Model(inputs, x), "adam", "mse")


@program(Data(normal(4, 4, 4, 1), integers(3)))
def video_transformer() -> keras.Model:
    """A video transformer: tubelets by a 3D convolution, positions by `ops.arange`."""

    class Positions(layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = layers.Embedding(shape[1], shape[2])
            self.places = ops.arange(0, shape[1], 1)

        def call(self, tokens: Any) -> Any:
            return tokens + self.table(self.places)

    inputs = keras.Input((4, 4, 4, 1))
    tubes = layers.Conv3D(4, 2, strides=2, padding="valid")(inputs)
    tokens = encoder(Positions()(layers.Reshape((-1, 4))(tubes)))
    return classifier(inputs, layers.GlobalAveragePooling1D()(tokens), keras.optimizers.Adam(1e-2))


@program(Data(normal(5, 4, seed=3), integers(3)))
def frames_by_a_recurrent_network() -> keras.Model:
    """Video classification: GRUs on frame features, with a mask as an input."""
    frames = keras.Input((5, 4))
    there = ops.any(frames > 0.5, axis=-1)
    x = layers.GRU(4, return_sequences=True)(frames, mask=there)
    return classifier(frames, layers.GRU(3)(x))


def _caption_rows() -> Data:
    words = integers(7, 5, low=1)
    return Data([normal(4, 4, 1), words[:, :-1]], words[:, 1:])


@program(_caption_rows(), quick=True)
def captions() -> keras.Model:
    """Image captions: a causal decoder that attends to image regions."""
    image, words = keras.Input((4, 4, 1)), keras.Input((4,), dtype="int32")
    regions = layers.Reshape((-1, 4))(layers.Conv2D(4, 2, strides=2)(image))
    x = layers.Embedding(7, 4)(words)
    x = layers.MultiHeadAttention(1, 2)(x, x, use_causal_mask=True) + x
    x = layers.LayerNormalization()(layers.MultiHeadAttention(1, 2)(x, regions) + x)
    return compiled(keras.Model([image, words], layers.Dense(7)(x)), "adam", of_classes())


@program(named(image=normal(6, 6, 1), rays=normal(6, 6, 3, seed=8), y=normal(6, 6, 4, seed=6)))
def radiance_field() -> keras.Model:
    """NeRF: positional encoding, and dense layers with a skip connection."""
    image, rays = keras.Input((6, 6, 1), name="image"), keras.Input((6, 6, 3), name="rays")
    coded = [rays]
    for power in range(2):
        coded += [ops.sin(2.0**power * rays), ops.cos(2.0**power * rays)]
    x = layers.Dense(4, activation="relu")(ops.concatenate(coded, -1))
    x = layers.concatenate([layers.Dense(4, activation="relu")(x), rays, image])
    return compiled(keras.Model({"image": image, "rays": rays}, layers.Dense(4)(x)), "adam")


@program(pictures())
def learned_resizer() -> keras.Model:
    """A learned resizer with an interpolated skip connection."""
    inputs = keras.Input((8, 8, 1))
    small = layers.Resizing(4, 4)(inputs)
    x = layers.LeakyReLU(0.2)(layers.Conv2D(3, 5, padding="same")(inputs))
    x = layers.Conv2D(1, 3, padding="same")(layers.Resizing(4, 4)(x))
    return classifier(inputs, layers.Flatten()(layers.add([small, x])), "adamax")


@program(Data(np.abs(normal(8, 8, 1)), np.abs(normal(8, 8, 1))))
def low_light() -> keras.Model:
    """Zero-DCE: low-light enhancement with losses of exposure and smoothness."""

    def exposure(_: Any, light: Any) -> Any:
        pooled = ops.average_pool(light, 4, 4)
        smooth = ops.mean(ops.square(light[:, 1:] - light[:, :-1]), (1, 2, 3))
        return ops.mean(ops.square(pooled - 0.6), (1, 2, 3)) + smooth

    inputs = keras.Input((8, 8, 1))
    x = inputs
    for _ in range(2):
        curve = layers.Conv2D(1, 3, padding="same", activation="tanh")(x)
        x = x + curve * (ops.square(x) - x)
    return compiled(keras.Model(inputs, x), "adam", exposure)
