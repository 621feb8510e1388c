"""Arrays are restored exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines import DataError
from pipelines.sources import open_source
from pipelines.sources.source import Options
from tests.support import opened

ARRAYS = {
    "image": np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3),
    "label": np.arange(5),
    "weight": np.linspace(0, 1, 5),
    "name": np.array(["a", "bc", "", "größer", "e"]),
    "flag": np.arange(5) > 2,
}


def check(location: Path) -> None:
    source = opened.source(location)
    assert opened.features(source) == {
        "image": ("uint8", (4, 3), "raw"),
        "label": ("int64", (), "list"),
        "weight": ("float64", (), "raw"),
        "name": ("string", (), "bytes"),
        "flag": ("bool", (), "list"),
    }
    for number, example in zip([3, 1], opened.examples(source, [3, 1]), strict=True):
        for name, array in ARRAYS.items():
            expected = array[number].encode() if name == "name" else array[number]
            np.testing.assert_array_equal(example[name], expected)


def test_arrays_of_an_npz_become_features(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **ARRAYS)
    check(tmp_path / "data.npz")


def test_npy_files_of_a_folder_become_features(tmp_path: Path) -> None:
    for name, array in ARRAYS.items():
        np.save(tmp_path / f"{name}.npy", array)
    check(tmp_path)


def test_single_npy_file_becomes_a_feature(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", ARRAYS["image"])
    assert set(opened.features(opened.source(tmp_path / "x.npy"))) == {"x"}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, "arrays with the same number of rows, got"),
        ({"a": np.zeros(3, np.complex64)}, "array 'a': cannot store complex64"),
        ({"a": np.array([{}])}, "not NumPy arrays of numbers or text"),
        ({"a": np.zeros(0)}, "found none"),
        ({"a": np.zeros((2, 0))}, "rows without values"),
    ],
)
def test_invalid_arrays_are_rejected(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(DataError, match=f"data.npz: .*{message}"):
        opened.source(tmp_path / "data.npz")


@pytest.mark.parametrize("name", ["data.npz", "data.npy"])
def test_other_file_than_an_array_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 no array")
    with pytest.raises(DataError, match="not NumPy arrays"):
        opened.source(tmp_path / name)


def test_arrays_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "0.npy", np.arange(3))
    with pytest.raises(DataError, match=r"several arrays are called 0\.npy"):
        opened.source(tmp_path)


def test_suffix_in_capitals(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **ARRAYS)
    check((tmp_path / "data.npz").rename(tmp_path / "DATA.NPZ"))


def test_splits_in_one_file(tmp_path: Path) -> None:
    """As in `mnist.npz` of Keras."""
    x = np.arange(6)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=-x, x_test=x[:2], y_test=-x[:2])
    with pytest.raises(DataError, match=r"contains the splits train, test; .* --split train"):
        opened.source(tmp_path / "a.npz")
    source = opened.source(tmp_path / "a.npz", split="test")
    assert opened.examples(source) == [{"x_test": i, "y_test": -i} for i in range(2)]
    account = open_source(str(tmp_path / "a.npz"), "auto", Options(split="test")).account
    assert account.kinds["arrays"].left_out["not in the split test"].count == 2
