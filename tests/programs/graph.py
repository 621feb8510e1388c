"""Programs for graphs and sets."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import NUM_ROWS, integers, named, normal
from tests.programs.text import binary
from tests.programs.vision import of_classes
from tests.support.case import compiled
from tests.support.data import Data


def _molecules() -> Data:
    """Returns graphs padded to five nodes, each with an adjacency matrix."""
    random = np.random.default_rng(0)
    edges = (random.uniform(size=(NUM_ROWS, 5, 5)) > 0.5).astype("float64")
    edges = np.maximum(edges, np.eye(5))
    return named(nodes=normal(5, 3), edges=np.maximum(edges, edges.transpose(0, 2, 1)))


def _graph() -> dict[str, keras.KerasTensor]:
    return {"nodes": keras.Input((5, 3), name="nodes"), "edges": keras.Input((5, 5), name="edges")}


class GraphAttention(layers.Layer):
    """Attention of each node over its neighbors."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.project = layers.Dense(units, use_bias=False)
        self.left, self.right = layers.Dense(1), layers.Dense(1)

    def call(self, nodes: Any, edges: Any) -> Any:
        x = self.project(nodes)
        scores = self.left(x) + ops.transpose(self.right(x), (0, 2, 1))
        scores = ops.where(edges > 0, ops.leaky_relu(scores, 0.2), -1e9)
        return ops.softmax(scores) @ x


@program(_molecules(), quick=True)
def graph_attention() -> keras.Model:
    """Graph attention on padded graphs."""
    inputs = _graph()
    x = GraphAttention(4)(inputs["nodes"], inputs["edges"])
    x = GraphAttention(3)(ops.elu(x), inputs["edges"])
    model = keras.Model(inputs, layers.Dense(1)(ops.mean(x, 1)))
    return compiled(model, keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))


@program(_molecules())
def graph_convolution() -> keras.Model:
    """Graph convolutions on padded graphs, normalized by degree."""
    inputs = _graph()
    degree = ops.sum(inputs["edges"], -1, keepdims=True)
    x = layers.Dense(3, activation="gelu")(inputs["nodes"])
    x = x + layers.Dense(3, activation="gelu")(inputs["edges"] @ x / degree)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalMaxPooling1D()(x)))
    return compiled(model, "adam", "mse")


@program(_molecules())
def messages_between_nodes() -> keras.Model:
    """Message passing with a GRU cell."""

    class Passing(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = layers.Dense(3), layers.GRUCell(3)

        def call(self, nodes: Any, edges: Any) -> Any:
            for _ in range(2):
                sent = ops.reshape(edges @ self.message(nodes), (-1, 3))
                flat, _ = self.update(sent, [ops.reshape(nodes, (-1, 3))])
                nodes = ops.reshape(flat, (-1, 5, 3))
            return nodes

    inputs = _graph()
    x = layers.GlobalAveragePooling1D()(Passing()(inputs["nodes"], inputs["edges"]))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), "adam", "mse")


class Atoms(keras.Model):
    """Sums over the atoms of each molecule; the molecules are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = layers.Dense(3, activation="relu"), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        """Maps atoms [atoms, 2] and the molecule of each [atoms] to [molecules, 1]."""
        atoms, molecule = inputs
        num = ops.max(molecule) + 1
        return self.out(tf.math.unsorted_segment_sum(self.embed(atoms), molecule, num))


def _merged() -> tf.data.Dataset:
    """Two batches of 3 and 2 molecules with 7 and 4 atoms."""

    def batches() -> Any:
        random = np.random.default_rng(1)
        for owners in ([0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1]):
            atoms = random.normal(size=(len(owners), 2))
            yield (atoms, np.array(owners, "int32")), random.normal(size=(max(owners) + 1, 1))

    spec = tf.TensorSpec
    signature = (
        (spec((None, 2), "float64"), spec((None,), "int32")), spec((None, 1), "float64"),
    )  # fmt: skip
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    # With an unknown length, plain Keras counts one step too many in every epoch.
    return dataset.apply(tf.data.experimental.assert_cardinality(2))


@program(Data(_merged), feed="data set", may_refuse=True)
def merged_molecules() -> keras.Model:
    """Molecules merged into one graph per batch."""
    return compiled(Atoms(), "adam", "mse")


@program(Data([integers(6, 1), integers(6, 1, seed=5)], integers(2, 1).astype("float64")))
def node_embeddings() -> keras.Model:
    """Node embeddings trained on neighbors."""
    one, other = keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")
    table = layers.Embedding(6, 3, embeddings_initializer="he_normal")
    product = layers.Dot(2)([table(one), table(other)])
    model = keras.Model([one, other], layers.Activation("sigmoid")(layers.Flatten()(product)))
    return compiled(model, "adam", "binary_crossentropy", metrics=[keras.metrics.AUC()])


@program(Data([normal(4, seed=n) for n in range(3)], integers(2, seed=4)), quick=True)
def bags_of_instances() -> keras.Model:
    """Multiple-instance learning: attention over separate inputs."""
    bag = [keras.Input((4,)) for _ in range(3)]
    embed, score = layers.Dense(3, activation="relu"), layers.Dense(1, use_bias=False)
    embedded = [embed(x) for x in bag]
    weights = ops.softmax(ops.concatenate([score(ops.tanh(x)) for x in embedded], 1))
    weighted = [weights[:, i : i + 1] * x for i, x in enumerate(embedded)]
    x = layers.Dense(2, activation="softmax")(layers.concatenate(weighted))
    loss = "sparse_categorical_crossentropy"
    return compiled(keras.Model(bag, x), "adam", loss, metrics=["accuracy"])


@program(Data(normal(5, 3), integers(3)))
def sets_of_points() -> keras.Model:
    """Deep sets: sums, maxima and minima over points."""
    inputs = keras.Input((5, 3))
    x = layers.Dense(3, activation="relu")(inputs)
    pooled = [ops.sum(x, 1), ops.max(x, 1), ops.min(x, 1)]
    merged = layers.concatenate([layers.Maximum()(pooled), layers.Minimum()(pooled)])
    model = keras.Model(inputs, layers.Dense(3)(layers.Subtract()([merged, merged * 0.5])))
    return compiled(model, "adam", of_classes())


@program(_molecules())
def edges_predicted() -> keras.Model:
    """Edge prediction: a label for each pair of nodes, from a cropped product."""
    inputs = _graph()
    x = layers.EinsumDense("rnf,fu->rnu", (5, 2))(inputs["nodes"])
    pairs = layers.Cropping1D(1)(x @ ops.transpose(x, (0, 2, 1)))
    return binary(inputs, layers.Flatten()(pairs))
