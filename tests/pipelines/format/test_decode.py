"""Values are restored exactly; values that would change are rejected."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipelines import DataError, Feature
from pipelines.format.examples import decode, encode
from pipelines.format.feature import DType

RAW = tuple(dtype for dtype in DType.__args__ if dtype != "string")
LIST = tuple(dtype for dtype in RAW if dtype != "float64")


@st.composite
def features_and_examples(draw: st.DrawFn) -> tuple[Feature, list[np.ndarray]]:
    encoding = draw(st.sampled_from(["raw", "list"]))
    dtype = draw(st.sampled_from(RAW if encoding == "raw" else LIST))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    feature = Feature(name="x", dtype=dtype, shape=shape, encoding=encoding)
    values = arrays.arrays(np.dtype(dtype), shape)
    return feature, draw(st.lists(values, min_size=1, max_size=3))


@settings(deadline=None, max_examples=60)
@given(features_and_examples())
def test_values_are_restored_bitwise(case: tuple[Feature, list[np.ndarray]]) -> None:
    feature, values = case
    records = [encode({"x": value}, [feature]) for value in values]
    batch = decode(tf.constant(records), [feature])["x"]
    single = decode(tf.constant(records[0]), [feature])["x"]
    assert batch.dtype == feature.dtype
    np.testing.assert_array_equal(batch.numpy(), np.stack(values))
    np.testing.assert_array_equal(single.numpy(), values[0])


@pytest.mark.parametrize("batch_shape", [(), (None,)])
def test_static_shapes_are_known(batch_shape: tuple[None, ...]) -> None:
    features = [
        Feature(name="image", dtype="uint8", shape=(4, 5, 3)),
        Feature(name="label", dtype="int32", encoding="list"),
    ]
    traced = tf.function(lambda records: decode(records, features)).get_concrete_function(
        tf.TensorSpec(batch_shape, tf.string)
    )
    shapes = {name: spec.shape.as_list() for name, spec in traced.structured_outputs.items()}
    assert shapes == {"image": [*batch_shape, 4, 5, 3], "label": [*batch_shape]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3, np.int32), r"feature 'x': expected int32 of shape \(2,\), got int32 of shape"),
        (np.array([1, 2**40]), "int32 cannot hold every value of this int64 array"),
        (np.array([0.5, 1.0]), "int32 cannot hold every value of this float64 array"),
        (np.array([np.nan, 1.0]), "int32 cannot hold"),
        (["1", "2"], "expected int32"),
    ],
)
def test_values_that_would_change_raise(value: object, message: str) -> None:
    feature = Feature(name="x", dtype="int32", shape=(2,))
    with pytest.raises(DataError, match=message):
        encode({"x": value}, [feature])


@pytest.mark.parametrize("encoding", ["raw", "list"])
def test_integers_beyond_64_bits_are_named(encoding: str) -> None:
    feature = Feature(name="x", dtype="int64", encoding=encoding)
    assert encode({"x": -(2**63)}, [feature])
    with pytest.raises(DataError, match="feature 'x': int64 cannot hold"):
        encode({"x": 2**63}, [feature])


def test_missing_and_unknown_features_raise() -> None:
    with pytest.raises(DataError, match=r"expected the features \['x'\], got \['y'\]"):
        encode({"y": 1}, [Feature(name="x", dtype="int32")])


def test_float64_does_not_fit_a_list() -> None:
    with pytest.raises(ValueError, match="use encoding 'raw'"):
        Feature(name="x", dtype="float64", encoding="list")


def test_record_of_another_size_raises() -> None:
    record = encode({"x": np.zeros(8, np.uint8)}, [Feature(name="x", dtype="uint8", shape=(8,))])
    other = Feature(name="x", dtype="uint8", shape=(4,))
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode(tf.constant([record, record]), [other])


@st.composite
def ragged_features_and_examples(draw: st.DrawFn) -> tuple[Feature, list[object]]:
    dtype = draw(st.sampled_from(["int64", "float32", "uint8", "string"]))
    encoding = "bytes" if dtype == "string" else "list"
    shape = draw(st.sampled_from([(), (2,), (None,)] if dtype == "string" else [(None,)]))
    feature = Feature(name="x", dtype=dtype, shape=shape, encoding=encoding)
    one = st.binary(max_size=5) if dtype == "string" else arrays.from_dtype(np.dtype(dtype))
    if shape == ():
        return feature, draw(st.lists(one, min_size=1, max_size=3))
    sizes = {} if shape == (None,) else {"min_size": 2, "max_size": 2}
    return feature, draw(st.lists(st.lists(one, **sizes), min_size=1, max_size=3))


@settings(deadline=None, max_examples=60)
@given(ragged_features_and_examples())
def test_vectors_of_any_length_and_strings_are_restored(case: tuple[Feature, list[object]]) -> None:
    feature, values = case
    records = [encode({"x": value}, [feature]) for value in values]
    batch = decode(tf.constant(records), [feature])["x"]
    assert isinstance(batch, tf.RaggedTensor) == feature.is_ragged
    assert batch.dtype == feature.dtype
    for i, value in enumerate(values):
        single = decode(tf.constant(records[i]), [feature])["x"]
        np.testing.assert_array_equal(single, value)
        np.testing.assert_array_equal(batch[i], value)


def test_boxes_of_any_number_are_restored() -> None:
    feature = Feature(name="x", dtype="float32", shape=(None, 4), encoding="list")
    values = [np.arange(4 * n, dtype=np.float32).reshape(n, 4) for n in (2, 0, 1)]
    records = [encode({"x": value}, [feature]) for value in values]
    batch = decode(tf.constant(records), [feature])["x"]
    assert batch.shape.as_list() == [3, None, 4]
    for i, value in enumerate(values):
        np.testing.assert_array_equal(batch[i], value)
        np.testing.assert_array_equal(decode(tf.constant(records[i]), [feature])["x"], value)
    wider = Feature(name="x", dtype="float32", shape=(None, 3), encoding="list")
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a multiple of"):
        decode(tf.constant(records), [wider])


def test_text_is_stored_as_utf8() -> None:
    feature = Feature(name="x", dtype="string", encoding="bytes")
    record = encode({"x": "größer"}, [feature])
    assert decode(tf.constant(record), [feature])["x"] == "größer".encode()


PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def png(shape: tuple[int | None, ...], dtype: str = "uint8") -> Feature:
    return Feature(name="x", dtype=dtype, shape=shape, encoding="png")


@pytest.mark.parametrize("shape", [(4, 5, 3), (None, None, 3)])
def test_images_are_restored(shape: tuple[int | None, ...]) -> None:
    stored = tf.io.encode_png(PIXELS).numpy()
    record = encode({"x": stored}, [png(shape)])
    np.testing.assert_array_equal(decode(tf.constant(record), [png(shape)])["x"], PIXELS)
    kept = decode(tf.constant([record]), [png(shape)], decode_images=False)["x"]
    assert kept.numpy().tolist() == [stored]


def test_images_of_one_size_are_batched() -> None:
    feature = png((4, 5, 3))
    record = encode({"x": tf.io.encode_png(PIXELS).numpy()}, [feature])
    batch = decode(tf.constant([record, record]), [feature])["x"]
    np.testing.assert_array_equal(batch, [PIXELS, PIXELS])


def test_batch_of_images_of_different_sizes_raises() -> None:
    feature = png((None, None, 3))
    record = encode({"x": tf.io.encode_png(PIXELS).numpy()}, [feature])
    with pytest.raises(DataError, match="decode and resize one record at a time"):
        decode(tf.constant([record]), [feature])


def test_png_of_sixteen_bits_is_restored() -> None:
    pixels = (PIXELS.astype(np.uint16) * 1000)[..., :1]
    feature = png((4, 5, 1), "uint16")
    record = encode({"x": tf.io.encode_png(pixels).numpy()}, [feature])
    np.testing.assert_array_equal(decode(tf.constant(record), [feature])["x"], pixels)


def test_image_of_another_size_raises() -> None:
    record = encode({"x": tf.io.encode_png(PIXELS).numpy()}, [png((None, None, 3))])
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode(tf.constant(record), [png((4, 4, 3))])


def test_bytes_that_are_no_image_raise() -> None:
    with pytest.raises(DataError, match="expected the bytes of a png file, got bytes that begin"):
        encode({"x": b"GIF89a"}, [png((None, None, 3))])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "string"}, "requires dtype 'string' and the reverse"),
        ({"dtype": "int64", "encoding": "bytes"}, "requires dtype 'string' and the reverse"),
        ({"dtype": "float32", "encoding": "jpeg", "shape": (8, 8, 3)}, "expected dtype uint8"),
        ({"dtype": "uint8", "encoding": "jpeg", "shape": (8, 8)}, "height, width, channels"),
        ({"dtype": "uint8", "shape": (None,)}, "'raw' requires a fixed shape"),
        (
            {"dtype": "int64", "encoding": "list", "shape": (2, None)},
            "only the first dimension may",
        ),
    ],
)
def test_features_that_cannot_be_stored_raise(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Feature(name="x", **fields)  # type: ignore[arg-type]


def test_records_equal_those_of_tensorflow() -> None:
    features = [
        Feature(name="é", dtype="int64", encoding="list"),
        Feature(name="a", dtype="float32", shape=(None,), encoding="list"),
        Feature(name="b", dtype="string", shape=(2,), encoding="bytes"),
        Feature(name="c", dtype="int64", shape=(None,), encoding="list"),
    ]
    values = {"é": -7, "a": np.float32([1.5, 2]), "b": ["x", b"\xff"], "c": np.int64([])}
    stored = {
        "é": tf.train.Feature(int64_list=tf.train.Int64List(value=[-7])),
        "a": tf.train.Feature(float_list=tf.train.FloatList(value=[1.5, 2])),
        "b": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x", b"\xff"])),
        "c": tf.train.Feature(int64_list=tf.train.Int64List()),
    }
    example = tf.train.Example(features=tf.train.Features(feature=stored))
    assert encode(values, features) == example.SerializeToString(deterministic=True)
