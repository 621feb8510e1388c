"""`python -m tests.studies.random_graphs`: checks what the row analysis says about random graphs.

Each graph applies random operations to rows and weights. It is run on a batch and on the parts of
the batch: the values have to be related as the classes of the analysis say. A seed and a number
identify a graph: `--seed 3 --first 17 --count 1` repeats graph 17 of seed 3.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests import start_tensorflow
from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import DRAWN, FREE, Dependence, Kind, rows

#: Rows of the batch, and of its parts.
NUM_ROWS, PARTS = 12, (8, 4)

#: Operations of a graph.
_NUM_OPERATIONS = 14


class Pool:
    """The tensors of a graph, from which operations take random inputs."""

    def __init__(self, seed: str, tensors: list[tf.Tensor]) -> None:
        self.draw, self.tensors = random.Random(seed), tensors

    def one(self, *dtypes: tf.DType, rank: int = 0) -> tf.Tensor:
        """Returns a tensor of one of some dtypes with at least some rank, rather a new one."""
        results = [
            t
            for t in self.tensors
            if t.dtype in (dtypes or (tf.float64,)) and (t.shape.rank or 0) >= rank
        ]
        return self.draw.choice(results[-5:] if self.draw.random() < 0.7 else results)

    def axis(self, tensor: tf.Tensor) -> int:
        """Returns a random axis."""
        return self.draw.randrange(-tensor.shape.rank, tensor.shape.rank)

    def number(self) -> tf.Tensor | int:
        """Returns a small number: a constant, or one that depends on other tensors."""
        if self.draw.random() < 0.5:
            return self.draw.randrange(1, 5)
        integers = [t for t in self.tensors if t.dtype == tf.int32 and t.shape.rank == 0]
        return self.draw.choice(integers) if integers else 2


def _elementwise(pool: Pool) -> tf.Tensor:
    functions = [tf.tanh, tf.square, tf.abs, tf.negative, tf.nn.relu, tf.sign, tf.zeros_like]
    functions += [tf.ones_like, tf.sqrt, tf.identity, lambda x: x * 2.0, lambda x: x / 3.0]
    return pool.draw.choice(functions)(pool.one())


def _of_two(pool: Pool) -> tf.Tensor:
    functions = [tf.add, tf.subtract, tf.multiply, tf.divide, tf.maximum, tf.minimum]
    return pool.draw.choice(functions)(pool.one(), pool.one())


def _reduced(pool: Pool) -> tf.Tensor:
    functions = [tf.reduce_sum, tf.reduce_mean] * 3 + [tf.reduce_max, tf.reduce_min]
    functions += [tf.reduce_prod, tf.reduce_logsumexp, tf.norm]
    tensor = pool.one(rank=1)
    axis = pool.draw.choice([None, 0, pool.axis(tensor)])
    return pool.draw.choice(functions)(tensor, axis=axis, keepdims=pool.draw.random() < 0.3)


def _along_axis(pool: Pool) -> tf.Tensor:
    tensor = pool.one(rank=1)
    axis = pool.axis(tensor)
    functions = [
        lambda: tf.nn.softmax(tensor, axis),
        lambda: tf.cumsum(tensor, axis),
        lambda: tf.reverse(tensor, [axis]),
        lambda: tf.roll(tensor, pool.number(), axis),
        lambda: tf.sort(tensor, axis),
        lambda: tf.expand_dims(tensor, axis),
        lambda: tf.squeeze(tensor, [axis]),
        lambda: tf.split(tensor, 2, axis)[pool.draw.randrange(2)],
        lambda: tf.split(tensor, [pool.number(), -1], axis)[pool.draw.randrange(2)],
        lambda: tf.unstack(tensor, axis=axis)[0],
        lambda: tf.concat([tensor, pool.one(rank=1)], axis),
        lambda: tf.stack([tensor, pool.one()], axis),
        lambda: tf.gather(tensor, [0, 1], axis=axis),
        lambda: tf.gather(tensor, pool.one(tf.int32), axis=axis),
        lambda: tf.linalg.band_part(tensor, 1, 0),
        lambda: tf.nn.l2_normalize(tensor, axis),
    ]
    return pool.draw.choice(functions)()


def _sliced(pool: Pool) -> tf.Tensor:
    tensor = pool.one(tf.float64, tf.int32, rank=1)
    number, rank = pool.number(), tensor.shape.rank
    functions = [
        lambda: tensor[:number],
        lambda: tensor[number:],
        lambda: tensor[::2],
        lambda: tensor[..., :number],
        lambda: tensor[..., 0],
        lambda: tensor[0],
        lambda: tensor[number],
        lambda: tensor[:, number:],
        lambda: tensor[:, None],
        lambda: tensor[None],
        lambda: tf.slice(tensor, [0] * rank, [-1] * (rank - 1) + [number]),
        lambda: tf.pad(tensor, [[0, number]] + [[0, 0]] * (rank - 1)),
        lambda: tf.pad(tensor, [[0, 0]] * (rank - 1) + [[1, number]]),
    ]  # fmt: skip
    return pool.draw.choice(functions)()


def _shaped(pool: Pool) -> tf.Tensor:
    tensor, other = pool.one(), pool.one(rank=1)
    size = tf.shape(other)
    functions = [
        lambda: tf.reshape(tensor, [-1]),
        lambda: tf.reshape(tensor, [-1, 2]),
        lambda: tf.reshape(tensor, [2, -1]),
        lambda: tf.reshape(tensor, [-1, 2, 2]),
        lambda: tf.reshape(tensor, [size[0], -1]),
        lambda: tf.reshape(tensor, [-1, size[0]]),
        lambda: tf.reshape(tensor, size),
        lambda: tf.reshape(other, tf.concat([size[:2], [-1]], 0)),
        lambda: tf.reshape(other, tf.concat([[-1], size[1:], [1]], 0)),
        lambda: tf.transpose(tensor, pool.draw.sample(range(tensor.shape.rank), tensor.shape.rank)),
        lambda: tf.tile(tensor, pool.draw.choices([1, 2], k=tensor.shape.rank)),
        lambda: tf.repeat(tensor, 2, axis=0),
        lambda: tf.broadcast_to(tensor, size),
        lambda: tf.fill(size, tensor),
        lambda: tf.fill([size[0], 2], tensor),
        lambda: tf.zeros(size, tf.float64) + tensor,
        lambda: tf.ones([size[0]], tf.float64) * tensor,
        lambda: tf.range(tf.cast(size[0], tf.float64)),
    ]
    return pool.draw.choice(functions)()


def _integers(pool: Pool) -> tf.Tensor:
    tensor = pool.one(rank=1)
    functions = [
        lambda: tf.shape(tensor)[pool.axis(tensor)],
        lambda: tf.size(tensor),
        lambda: tf.argmax(tensor, pool.axis(tensor), output_type=tf.int32),
        lambda: tf.cast(tf.reduce_max(tensor) > 0, tf.int32),
        lambda: tf.cast(pool.one() > 0, tf.int32),
        lambda: pool.one(tf.int32) // 2,
        lambda: pool.one(tf.int32) * pool.one(tf.int32),
        lambda: tf.minimum(pool.one(tf.int32), 2),
        lambda: tf.reduce_sum(pool.one(tf.int32)),
        lambda: tf.cast(tf.where(tensor > 0)[:, 0], tf.int32),
    ]
    return pool.draw.choice(functions)()


def _from_integers(pool: Pool) -> tf.Tensor:
    tensor = pool.one(tf.int32)
    functions = [
        lambda: tf.cast(tensor, tf.float64),
        lambda: tf.one_hot(tensor, 4, axis=pool.draw.choice([-1, 0]), dtype=tf.float64),
        lambda: tf.gather(pool.one(rank=1), tensor % 4),
        lambda: pool.one() / tf.cast(tensor, tf.float64),
    ]
    return pool.draw.choice(functions)()


def _selected(pool: Pool) -> tf.Tensor:
    mask, tensor, size = pool.one(), pool.one(rank=1), tf.shape(pool.one(rank=1))[0]
    largest = tf.reduce_max(tensor, range(1, tensor.shape.rank))
    places = tf.squeeze(tf.where(largest > 0), 1)
    functions = [
        lambda: tf.where(mask > 0, tensor, pool.one()),
        lambda: tf.boolean_mask(tensor, mask > 0),
        lambda: tf.boolean_mask(tensor, tensor > 0),
        lambda: tf.gather(tensor, tf.squeeze(tf.where(tf.reshape(mask, [-1]) > 0), 1)),
        lambda: tf.gather(tensor, tf.squeeze(tf.where(tf.reshape(mask, [-1]) > 0), 1) * 2 % 4),
        lambda: tf.boolean_mask(tensor, largest > 0),
        lambda: tf.boolean_mask(tensor, largest * 0.0 >= 0),
        lambda: tf.reshape(tf.boolean_mask(tensor, largest * 0.0 >= 0), [-1, size]),
        lambda: tf.gather(tensor, places) - tf.reduce_mean(tf.gather(tensor, places), -1, True),
        lambda: tf.tile(pool.one(rank=2), tf.stack([tf.size(places), 1])),
        lambda: tf.tile(pool.one(rank=1)[None], tf.stack([tf.size(places), pool.number()])),
        lambda: tf.cast(tf.size(places), tf.float64),
    ]
    return pool.draw.choice(functions)()


def _product(pool: Pool) -> tf.Tensor:
    a, b = pool.one(rank=2), pool.one(rank=2)
    functions = [
        lambda: tf.matmul(a, b),
        lambda: tf.matmul(a, b, transpose_a=True),
        lambda: tf.matmul(a, b, transpose_b=True),
        lambda: tf.einsum("ab,ac->bc", a, b),
        lambda: tf.einsum("ab,cb->ac", a, b),
        lambda: tf.einsum("ab,ab->a", a, b),
        lambda: tf.einsum("ab->b", a),
        lambda: tf.einsum("...b,b->...", a, pool.one(rank=1)),
        lambda: tf.einsum("...b,...b->...", a, b),
        lambda: tf.einsum("...ab,cb->...ac", a, b),
        lambda: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(a), b),
        lambda: tf.nn.l2_loss(a),
    ]
    return pool.draw.choice(functions)()


def _controlled(pool: Pool) -> tf.Tensor:
    a, b, c = pool.one(), pool.one(), pool.one(rank=1)

    def counted(count: Any) -> tf.Tensor:
        def body(i: Any, total: Any) -> tuple[Any, Any]:
            return i + 1, tf.tanh(total) + tf.ensure_shape(b, total.shape)

        return tf.while_loop(lambda i, _: i < count, body, (0, a))[1]

    def read(place: Callable[[Any], Any]) -> tf.Tensor:
        number = tf.shape(b)[0]
        found = tf.TensorArray(tf.float64, number, element_shape=None)

        def body(i: Any, found: Any) -> tuple[Any, Any]:
            return i + 1, found.write(i, tf.tanh(c[place(i), ...]))

        return tf.while_loop(lambda i, _: i < number, body, (0, found))[1].stack()

    def stitched(tensor: tf.Tensor, order: list[int], repeated: bool = False) -> tf.Tensor:
        numbers = tf.cast(tf.reshape(b, [-1]) > 0, tf.int32)
        places = tf.dynamic_partition(tf.range(tf.shape(c)[0]), numbers, 2)
        entries = [tf.gather(tensor, places[i]) for i in order]
        if repeated:
            lengths = [tf.size(places[order[1]])] + [1] * (c.shape.rank - 1)
            entries[1] = tf.tile(pool.one(rank=1)[None], tf.stack(lengths))
        return tf.dynamic_stitch(places, entries)

    def chosen(then: Callable[[Any], Any], otherwise: Callable[[Any], Any]) -> tf.Tensor:
        def choose(pair: Any) -> Any:
            positive = tf.reduce_sum(pair[1]) > 0
            return tf.cond(positive, lambda: then(pair[0]), lambda: otherwise(pair[0]))

        return tf.vectorized_map(choose, (c, b))

    functions = [
        lambda: tf.cond(tf.reduce_sum(b) > 0, lambda: tf.tanh(a), lambda: -a),
        lambda: counted(2),
        lambda: counted(pool.number()),
        lambda: tf.map_fn(lambda row: tf.tanh(row) + tf.reduce_mean(a), c),
        lambda: tf.map_fn(lambda row: row * 2.0, c),
        lambda: tf.vectorized_map(lambda row: tf.tanh(row) + tf.reduce_mean(row), c),
        lambda: tf.vectorized_map(lambda row: row * a, c),
        lambda: tf.vectorized_map(lambda pair: pair[0] * pair[1], (c, b)),
        lambda: tf.vectorized_map(lambda row: tf.matmul(row, pool.one(rank=2)), c),
        lambda: tf.vectorized_map(lambda row: tf.linalg.matvec(pool.one(rank=2), row), c),
        lambda: tf.vectorized_map(
            lambda row: tf.cond(tf.reduce_sum(row) > 0, lambda: row * 2.0, lambda: tf.tanh(row)), c
        ),
        lambda: tf.vectorized_map(
            lambda pair: tf.cond(pool.one() > 0, lambda: pair[0] * a, lambda: -pair[0]), (c, b)
        ),
        lambda: tf.vectorized_map(
            lambda pair: tf.cond(
                tf.reduce_max(pair[1]) > 0, lambda: tf.tanh(pair[0]), lambda: pair[0] + b
            ),
            (c, b),
        ),
        lambda: chosen(lambda row: row - tf.reduce_mean(row), tf.ones_like),
        lambda: chosen(lambda row: tf.ensure_shape(a, row.shape), tf.zeros_like),
        lambda: chosen(lambda row: row / tf.norm(row), lambda row: row - tf.reduce_max(b)),
        lambda: chosen(lambda row: tf.reduce_sum(row) * a, lambda row: a),
        lambda: read(lambda i: i),
        lambda: read(lambda i: tf.maximum(i - 1, 0)),
        lambda: stitched(c, [0, 1]),
        lambda: stitched(c, pool.draw.choices([0, 1], k=2)),
        lambda: stitched(c, [0, 1], repeated=True),
        lambda: stitched(c, pool.draw.choices([0, 1], k=2), repeated=True),
        lambda: tf.gather(c, tf.range(tf.shape(b)[0]), axis=pool.axis(c)),
        lambda: tf.scan(lambda total, row: tf.tanh(total + row), c),
        lambda: tf.foldl(lambda total, row: total + row, c),
        lambda: tf.TensorArray(tf.float64, 3).unstack(a).stack(),
        lambda: tf.TensorArray(tf.float64, pool.number()).write(0, a).stack(),
    ]
    return pool.draw.choice(functions)()


def _gradient(pool: Pool) -> tf.Tensor:
    result = tf.gradients(pool.one(), pool.one())[0]
    if result is None:
        raise ValueError("the one does not depend on the other")
    return tf.convert_to_tensor(result)


def _of_images(pool: Pool) -> tf.Tensor:
    series, image = pool.one(rank=3), pool.one(rank=3)[..., None]
    functions = [
        lambda: tf.nn.conv1d(series, tf.ones([2, series.shape[-1], 2], tf.float64), 1, "SAME"),
        lambda: tf.nn.avg_pool1d(series, 2, 1, "SAME"),
        lambda: tf.nn.max_pool2d(image, 2, 1, "SAME"),
        lambda: tf.image.adjust_contrast(pool.one(rank=3), 2.0),
        lambda: tf.image.resize(image, [3, 2]),
        lambda: tf.image.resize(image, [pool.number(), 2]),
        lambda: tf.vectorized_map(lambda row: tf.image.resize(row, [3, 2]), image[..., None]),
        lambda: tf.nn.bias_add(series, tf.ones([series.shape[-1]], tf.float64)),
        lambda: tf.linalg.diag_part(series),
        lambda: tf.linalg.matrix_transpose(series),
    ]
    return pool.draw.choice(functions)()


OPERATIONS: list[tuple[Callable[[Pool], tf.Tensor], int]] = [
    (_elementwise, 3), (_of_two, 5), (_reduced, 6), (_along_axis, 4), (_sliced, 4), (_shaped, 4),
    (_integers, 3), (_from_integers, 2), (_selected, 2), (_product, 3), (_controlled, 2),
    (_gradient, 2), (_of_images, 2),
]  # fmt: skip


def errors_of(seed: int, number: int) -> list[str]:
    """Returns the tensors of a random graph whose values contradict their class."""
    tensors, analysis, graph = _graph(f"{seed} {number}")
    draw = np.random.default_rng([seed, number])
    x, *weights = (draw.normal(size=shape) for shape in ((NUM_ROWS, 4), (4, 2), (4,)))
    batches = [x, *np.split(x, np.cumsum(PARTS)[:-1])]
    errors, names = [], [tensor.name for tensor in graph.inputs]
    with tf.compat.v1.Session(graph=graph) as session:
        for place, tensor in enumerate(tensors):
            value = analysis.of(tensor)
            if value.kind in (Kind.MIXED, Kind.UNKNOWN):
                continue
            feeds = [dict(zip(names, [part, *weights], strict=True)) for part in batches]
            try:
                whole, *parts = (session.run(tensor.name, feed) for feed in feeds)
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError):
                continue  # the operands of this operation, or of one before, do not fit
            try:
                holds = _holds(value, whole, parts)
            except ValueError:  # the shapes do not fit together
                holds = False
            if not holds:
                errors.append(f"{place}: {tensor.op.type} {tensor.shape}: {value}")
    return errors


def _graph(seed: str) -> tuple[list[tf.Tensor], RowAnalysis, Any]:
    """Returns the tensors of a random graph, their analysis, and the graph."""
    tensors: list[tf.Tensor] = []

    def compute(x: tf.Tensor, weights: tf.Tensor, vector: tf.Tensor) -> None:
        pool = Pool(seed, [x, weights, vector, tf.reduce_sum(vector), tf.constant(3), tf.shape(x)])
        functions, chances = zip(*OPERATIONS, strict=True)
        while len(pool.tensors) < 6 + _NUM_OPERATIONS:
            try:
                made = pool.draw.choices(functions, chances)[0](pool)
            except (ValueError, TypeError, LookupError):
                continue  # operands that do not fit
            if made.shape.rank is not None:
                pool.tensors.append(made)
        tensors.extend(pool.tensors)

    shapes = ([None, 4], [4, 2], [4])
    specs = [tf.TensorSpec(shape, tf.float64) for shape in shapes]
    graph = tf.function(compute, autograph=False).get_concrete_function(*specs).graph
    analysis = RowAnalysis(zip(graph.inputs, [rows(), FREE, FREE], strict=True))
    return tensors, analysis, graph


def _holds(value: Dependence, whole: Any, parts: list[Any]) -> bool:
    """Returns whether the value of a batch and those of its parts are related as a class says."""
    if value.is_plain:
        return all(_close(whole, part) for part in parts)
    if value.kind is Kind.SHAPE:
        pairs = enumerate(value.parts)
        return all(_holds(part, whole[i], [own[i] for own in parts]) for i, part in pairs)
    whole = whole / float(NUM_ROWS) ** value.power
    parts = [part / float(n) ** value.power for part, n in zip(parts, PARTS, strict=True)]
    if value.kind is Kind.FREE:
        return all(_close(whole, part) for part in parts)
    if value.kind is Kind.SUMMED:
        return len({part.shape for part in parts}) == 1 and _close(whole, sum(parts))
    segments = [part.factor for part in value.parts] if value.parts not in ((), DRAWN) else [1]
    joined = [
        _segment(part, value.axis, segments, place)
        for place in range(len(segments))
        for part in parts
    ]
    return _close(whole, np.concatenate(joined, value.axis))


def _segment(numbers: Any, axis: int, factors: list[Any], place: int) -> Any:
    """Returns a part of a tensor that holds several entries per row, one after another."""
    per_row = numbers.shape[axis] // sum(factors)
    begin, end = sum(factors[:place]) * per_row, sum(factors[: place + 1]) * per_row
    return np.take(numbers, range(begin, end), axis)


def _close(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return False
    # What overflows says nothing.
    known = np.isfinite(a) & np.isfinite(b) & (np.abs(a) < 1e6) & (np.abs(b) < 1e6)
    return bool(np.allclose(a[known], b[known], rtol=1e-6, atol=1e-6))


def main() -> int:
    """Checks random graphs; returns 1 if the analysis of any is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.random_graphs", description=__doc__
    )
    parser.add_argument("--count", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--first", type=int, default=0, help="number to begin with, default: 0")
    arguments = parser.parse_args()
    start_tensorflow()
    tf.get_logger().setLevel("CRITICAL")  # branches that do not fit log pages of errors
    num_wrong = 0
    for number in range(arguments.first, arguments.first + arguments.count):
        errors = errors_of(arguments.seed, number)
        if errors:
            num_wrong += 1
            print(f"graph {number}:", *errors, sep="\n  ", flush=True)
    print(f"{arguments.count} graphs, {num_wrong} wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
