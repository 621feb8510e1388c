"""Each collective key of sums of varying size belongs to one op and one size."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist import devices
from tfdist.errors import ConfigurationError
from tfdist.groups import varying_sizes
from tfdist.groups.varying_sizes import MAX_OPERATIONS, VaryingSizes, keys

MOST_ELEMENTS = tf.int32.max

#: Near the ends of the key ranges of groups, where collisions would occur.
_NUMBERS = st.one_of(st.integers(0, 2000), st.integers(MAX_OPERATIONS - 2000, MAX_OPERATIONS - 1))
_SIZES = st.one_of(
    st.integers(0, 5),
    st.integers((1 << 22) - 3, (1 << 22) + 3),
    st.integers(0, MOST_ELEMENTS),
    st.integers(MOST_ELEMENTS - 3, MOST_ELEMENTS),
)


def tokens(device_names: list[str]) -> list[tf.Variable]:
    """Returns an ordering token on each of several devices."""
    made = []
    for device_name in device_names:
        with tf.device(device_name):
            made.append(tf.Variable(0.0, trainable=False))
    return made


def key(operation: int, size: int) -> tuple[int, int]:
    group, instance = keys(operation, tf.constant(size, tf.int32))
    return int(group), int(instance)


@settings(deadline=None, max_examples=50)
@given(a=st.tuples(_NUMBERS, _SIZES), b=st.tuples(_NUMBERS, _SIZES))
def test_keys_are_unique(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert (key(*a) == key(*b)) == (a == b)
    assert all(0 < part < 1 << 31 for part in (key(*a)[0], key(*a)[1] + 1))


def test_most_sums_have_one_group() -> None:
    """NCCL connects the devices anew for each group."""
    assert len({key(number, size)[0] for number in (0, 100, 511) for size in (0, 1 << 21)}) == 1


def test_key_out_of_range_raises() -> None:
    with pytest.raises(ConfigurationError, match=f"has built {MAX_OPERATIONS} collectives"):
        key(MAX_OPERATIONS, 1)


def test_new_strategy_objects_use_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varying_sizes, "_OPERATIONS_A_GROUP", 2)
    one, other = (VaryingSizes(tokens(["CPU:0", "CPU:0"]), 0, 2, "ring") for _ in range(2))
    first = [one._next_operation(0) for _ in range(3)]
    second = [other._next_operation(0) for _ in range(3)]
    assert len({*first, *second}) == 6
    assert [one._next_operation(1) for _ in range(3)] == first
    assert [other._next_operation(1) for _ in range(3)] == second


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_sums_of_changing_sizes_over_several_groups(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 2^22 elements, and more sums than in one group; repeated by a new object."""
    monkeypatch.setattr(varying_sizes, "_OPERATIONS_A_GROUP", 2)
    device_names = [f"/device:{name}" for name in devices.resolve(3, 3)][:num_replicas]
    sums = VaryingSizes(tokens(device_names), 0, num_replicas, "ring")
    spec = tf.TensorSpec([None])

    @tf.function(autograph=False, input_signature=[spec, spec])
    def run(small: tf.Tensor, large: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for index, device_name in enumerate(device_names):
            with tf.device(device_name):
                results += [sums.reduce(small[i:] * index, index) for i in range(3)]
                results += [sums.reduce(large, index)[-1:]]
        return results

    factor = sum(range(num_replicas))
    for size in (20, 13):
        small, large = np.arange(size, dtype="float32"), np.ones((1 << 22) + size, "float32")
        for number, result in enumerate(run(small, large)):
            at = number % 4
            np.testing.assert_array_equal(
                result, [num_replicas] if at == 3 else small[at:] * factor
            )
