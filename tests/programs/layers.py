"""Layers of Keras: each model applies many of them to the same input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.programs.program import program
from tests.programs.rows import NUM_ROWS, integers, normal
from tests.support.case import compiled
from tests.support.data import Data


def branches(inputs: Any, *parts: Callable[[Any], Any], rate: float = 0.002) -> keras.Model:
    """Returns a model that sums the outputs of layers, each reduced to one number per row."""
    numbers = [layers.Dense(1)(layers.Flatten()(branch(inputs))) for branch in parts]
    model = keras.Model(inputs, layers.Add()(numbers))
    return compiled(model, keras.optimizers.SGD(rate, momentum=0.9))


def in_inference(*parts: layers.Layer) -> list[Callable[[Any], Any]]:
    """Returns random layers called as in inference, because replicas draw different numbers.

    Each is inside a `Lambda`: a functional model passes its `training` to all of its layers.
    """
    return [layers.Lambda(functools.partial(_call_in_inference, layer)) for layer in parts]


def _call_in_inference(layer: layers.Layer, x: Any) -> Any:
    return layer(x, training=False)


LINE = Data(normal(6, 4), normal(1))
PLANE = Data(normal(6, 6, 2), normal(1))
SPACE = Data(normal(4, 4, 4, 2), normal(1))


@program(LINE, quick=True)
def activations() -> keras.Model:
    """Activation, reshaping and normalization layers."""
    return branches(
        keras.Input((6, 4)),
        layers.Activation("tanh"),
        layers.ActivityRegularization(l1=0.01, l2=0.01),
        layers.ELU(),
        layers.Identity(),
        layers.LeakyReLU(),
        layers.PReLU(),
        layers.ReLU(max_value=1.0),
        layers.Softmax(),
        layers.Permute((2, 1)),
        layers.Reshape((4, 6)),
        layers.Rescaling(2.0),
        layers.GroupNormalization(2),
        layers.LayerNormalization(),
        layers.RMSNormalization(),
        layers.UnitNormalization(),
        layers.EinsumDense("btf,fu->btu", (6, 2)),
        layers.SpectralNormalization(layers.Dense(2)),
        layers.TimeDistributed(layers.Dense(2)),
        layers.Lambda(lambda x: x * x),
        lambda x: layers.Masking()(x),
        lambda x: layers.RepeatVector(2)(layers.Flatten()(x)),
    )


@program(LINE)
def attention() -> keras.Model:
    """Attention layers."""
    return branches(
        keras.Input((6, 4)),
        lambda x: layers.GroupQueryAttention(2, 2, 1)(x, x),
        lambda x: layers.MultiHeadAttention(2, 2)(x, x),
        lambda x: layers.Attention()([x, x]),
        lambda x: layers.AdditiveAttention()([x, x]),
    )


@program(LINE)
def of_one_dimension() -> keras.Model:
    """Convolution, pooling and other layers for 1D data."""
    return branches(
        keras.Input((6, 4)),
        layers.Conv1D(2, 3),
        layers.Conv1DTranspose(2, 3),
        layers.DepthwiseConv1D(3),
        layers.SeparableConv1D(2, 3),
        layers.AveragePooling1D(2),
        layers.MaxPooling1D(2),
        layers.AdaptiveAveragePooling1D(2),
        layers.AdaptiveMaxPooling1D(2),
        layers.GlobalAveragePooling1D(),
        layers.GlobalMaxPooling1D(),
        layers.Cropping1D(1),
        layers.UpSampling1D(2),
        layers.ZeroPadding1D(1),
        layers.SpatialDropout1D(0.0),
    )


@program(PLANE)
def of_two_dimensions() -> keras.Model:
    """Convolution, pooling and other layers for 2D data."""
    return branches(
        keras.Input((6, 6, 2)),
        layers.Conv2D(2, 3),
        layers.Conv2DTranspose(2, 3),
        layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(2, 3),
        layers.AveragePooling2D(2),
        layers.MaxPooling2D(2),
        layers.AdaptiveAveragePooling2D(2),
        layers.AdaptiveMaxPooling2D(2),
        layers.GlobalAveragePooling2D(),
        layers.GlobalMaxPooling2D(),
        layers.Cropping2D(1),
        layers.UpSampling2D(2),
        layers.ZeroPadding2D(1),
        layers.SpatialDropout2D(0.0),
        layers.CenterCrop(3, 3),
        layers.Resizing(3, 3),
    )


@program(SPACE, floatx="float32")
def of_three_dimensions() -> keras.Model:
    """Convolution, pooling and other layers for 3D data."""
    return branches(
        keras.Input((4, 4, 4, 2)),
        layers.Conv3D(2, 3),
        layers.Conv3DTranspose(2, 2),
        layers.AveragePooling3D(2),
        layers.MaxPooling3D(2),
        layers.AdaptiveAveragePooling3D(2),
        layers.AdaptiveMaxPooling3D(2),
        layers.GlobalAveragePooling3D(),
        layers.GlobalMaxPooling3D(),
        layers.Cropping3D(1),
        layers.UpSampling3D(2),
        layers.ZeroPadding3D(1),
        layers.SpatialDropout3D(0.0),
    )


@program(LINE)
def recurrent() -> keras.Model:
    """Recurrent layers and cells."""
    return branches(
        keras.Input((6, 4)),
        layers.SimpleRNN(2),
        layers.GRU(2),
        layers.LSTM(2),
        layers.Bidirectional(layers.SimpleRNN(2)),
        layers.RNN(layers.StackedRNNCells([layers.LSTMCell(2), layers.SimpleRNNCell(2)])),
        layers.RNN(layers.GRUCell(2), unroll=True),
    )


@program(Data(normal(2, 4, 4, 2), normal(1)), epochs=1)
def recurrent_convolutions() -> keras.Model:
    """Convolutional LSTMs for 1D and 2D data."""
    return branches(
        keras.Input((2, 4, 4, 2)),
        layers.ConvLSTM2D(2, 3),
        lambda x: layers.ConvLSTM1D(2, 3)(layers.Reshape((2, 16, 2))(x)),
        lambda x: layers.ConvLSTM3D(2, 2)(layers.Reshape((2, 4, 2, 2, 2))(x)),
    )


@program(Data([normal(3), normal(3, seed=1)], normal(1)))
def merging() -> keras.Model:
    """Merging layers."""
    inputs = [keras.Input((3,)), keras.Input((3,))]
    merged = [
        layers.Add()(inputs),
        layers.Average()(inputs),
        layers.Concatenate()(inputs),
        layers.Dot(1)(inputs),
        layers.Maximum()(inputs),
        layers.Minimum()(inputs),
        layers.Multiply()(inputs),
        layers.Subtract()(inputs),
    ]
    model = keras.Model(inputs, layers.Dense(1)(layers.concatenate(merged)))
    return compiled(model, "adam")


@program(Data(np.abs(normal(6, 6, 3)).clip(0, 1), normal(1)), epochs=1, floatx="float32")
def augmenting_at_rest() -> keras.Model:
    """Image augmentation layers in inference mode."""
    return branches(
        keras.Input((6, 6, 3)),
        *in_inference(
            layers.AugMix(value_range=(0, 1)),
            layers.CutMix(),
            layers.MixUp(),
            layers.RandAugment(value_range=(0, 1)),
            layers.RandomBrightness(0.2, value_range=(0, 1)),
            layers.RandomColorDegeneration(0.2),
            layers.RandomColorJitter((0, 1), 0.1, 0.1, 0.1, 0.1),
            layers.RandomContrast(0.2),
            layers.RandomCrop(6, 6),
            layers.RandomElasticTransform(),
            layers.RandomErasing(),
            layers.RandomFlip(),
            layers.RandomGaussianBlur(value_range=(0, 1)),
            layers.RandomGrayscale(),
            layers.RandomHue(0.1, value_range=(0, 1)),
            layers.RandomInvert(value_range=(0, 1)),
            layers.RandomPerspective(),
            layers.RandomPosterization(4, value_range=(0, 1)),
            layers.RandomRotation(0.1),
            layers.RandomSaturation(0.2),
            layers.RandomSharpness(0.2, value_range=(0, 1)),
            layers.RandomShear(),
            layers.RandomTranslation(0.1, 0.1),
            layers.RandomZoom(0.1),
            layers.Pipeline([layers.RandomFlip(), layers.RandomZoom(0.1)]),
            layers.AlphaDropout(0.3),
            layers.Dropout(0.3),
            layers.GaussianDropout(0.3),
            layers.GaussianNoise(0.3),
        ),
        rate=0.0002,  # the sum of many branches has a steep loss
    )


@program(Data(np.abs(normal(8, 8, 3)), normal(1)), epochs=1, floatx="float32")
def levelling_pictures() -> keras.Model:
    """Deterministic image preprocessing layers."""
    return branches(
        keras.Input((8, 8, 3)),
        layers.AutoContrast(value_range=(0, 1)),
        layers.Equalization(value_range=(0, 1)),
        layers.ContrastLimitedAdaptiveHistogramEqualization(value_range=(0, 1)),
        lambda x: layers.Solarization(value_range=(0, 1))(x, training=False),
    )


WORDS = np.array([["b a", "a c", "c"][i % 3] for i in range(NUM_ROWS)], object)


@program(Data({"words": WORDS, "number": integers(6, 1)}, normal(1)), feed="dataset")
def looking_up() -> keras.Model:
    """Preprocessing layers for categories."""
    words = keras.Input((), name="words", dtype="string")
    number = keras.Input((1,), name="number", dtype="int32")
    scaled = layers.Normalization(mean=2.0, variance=1.5)(keras.ops.cast(number, "float64"))
    coded = [
        layers.TextVectorization(vocabulary=["a", "b"], output_mode="tf_idf", idf_weights=[1, 2])(
            words
        ),
        layers.StringLookup(vocabulary=["c"], output_mode="one_hot")(words),
        layers.IntegerLookup(vocabulary=[1, 2, 3], output_mode="multi_hot")(number),
        layers.CategoryEncoding(6, "multi_hot")(number),
        layers.Hashing(4, output_mode="one_hot")(number),
        layers.HashedCrossing(4, output_mode="one_hot")((number, number)),
        layers.Discretization([1.0, 3.0], output_mode="one_hot")(number),
        layers.Flatten()(layers.Embedding(6, 2)(number)),
        layers.Flatten()(layers.ReversibleEmbedding(6, 2)(number)),
        scaled,
    ]
    coded = [keras.ops.cast(x, "float64") for x in coded]
    model = keras.Model(
        {"words": words, "number": number}, layers.Dense(1)(keras.ops.concatenate(coded, -1))
    )
    return compiled(model, "adam")
