"""Every value comes back as it was written; what would not is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipelines import DataError, Feature
from pipelines.schema import DType, decode, encode

RAW = DType.__args__
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
def test_values_come_back_bit_for_bit(case: tuple[Feature, list[np.ndarray]]) -> None:
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
    ("value", "says"),
    [
        (np.zeros(3, np.int32), r"feature 'x': expected int32 of shape \(2,\), got int32 of shape"),
        (np.array([1, 2**40]), "int32 cannot hold every value of this int64 array"),
        (np.array([0.5, 1.0]), "int32 cannot hold every value of this float64 array"),
        (np.array([np.nan, 1.0]), "int32 cannot hold"),
        (["1", "2"], "expected int32"),
    ],
)
def test_values_that_would_change_are_refused(value: object, says: str) -> None:
    feature = Feature(name="x", dtype="int32", shape=(2,))
    with pytest.raises(DataError, match=says):
        encode({"x": value}, [feature])


def test_missing_and_unknown_features_are_refused() -> None:
    with pytest.raises(DataError, match=r"expected the features \['x'\], got \['y'\]"):
        encode({"y": 1}, [Feature(name="x", dtype="int32")])


def test_float64_does_not_fit_a_list() -> None:
    with pytest.raises(ValueError, match="use encoding 'raw'"):
        Feature(name="x", dtype="float64", encoding="list")


def test_record_of_another_size_is_refused() -> None:
    record = encode({"x": np.zeros(8, np.uint8)}, [Feature(name="x", dtype="uint8", shape=(8,))])
    other = Feature(name="x", dtype="uint8", shape=(4,))
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode(tf.constant([record, record]), [other])
