"""Recipe `table`: classes, statistics and vocabularies equal those of scikit-learn and Keras."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from sklearn.preprocessing import OrdinalEncoder, StandardScaler
from sklearn.utils.class_weight import compute_class_weight

from recipes import _class_folders, _settings, table
from tfdist.config import TrainConfig


def read(path: Path, text: str, **settings: object) -> table.Table:
    path.write_text(text)
    table._read.cache_clear()
    return table._table(TrainConfig(data=str(path), set=settings))


@pytest.mark.parametrize(
    "labels",
    [[*range(12)], [8, 9, 10], [-2, -1, 0, 1], [0.0, 1.0], ["1e1", "x", "2"], ["true", "false"]],
    ids=str,
)
def test_rows_have_the_class_of_their_label(labels: list[object], tmp_path: Path) -> None:
    rows = "".join(f"{i % len(labels)},{labels[i % len(labels)]}\n" for i in range(120))
    result = read(tmp_path / "t.csv", "x,label\n" + rows)
    for part in (result.train, result.validation):
        wanted = [str(labels[int(x)]).removesuffix(".0") for x in part["numbers"][:, 0]]
        assert [result.classes[k].lower() for k in part["label"]] == wanted
    held_out = np.bincount(result.validation["label"]), np.bincount(result.train["label"])
    assert (held_out[0] == 120 // len(labels) // 5).all()
    weights = compute_class_weight(
        "balanced", classes=np.arange(len(labels)), y=result.train["label"]
    )
    np.testing.assert_allclose(_class_folders.balanced_weights(held_out[1]), weights, rtol=1e-6)


def test_statistics_equal_those_of_scikit_learn_and_keras() -> None:
    rng = np.random.default_rng(0)
    values = np.stack([rng.integers(2000, 2021, 200_000), rng.normal(1e5, 5, 200_000),
                       np.full(200_000, 7)], 1).astype("float32")  # fmt: skip
    found, whole = table.statistics(values), StandardScaler().fit(values.astype("float64"))
    np.testing.assert_allclose(found.mean_, whole.mean_, rtol=1e-12)
    np.testing.assert_allclose(found.scale_, whole.scale_, rtol=1e-9)
    layer = keras.layers.Normalization()
    layer.adapt(values[:1000, :1])
    few = table.statistics(values[:1000, :1])
    np.testing.assert_allclose(few.mean_, np.ravel(layer.mean), rtol=1e-5)
    np.testing.assert_allclose(few.var_, np.ravel(layer.variance), rtol=1e-3)


def test_vocabulary_has_the_order_of_scikit_learn(tmp_path: Path) -> None:
    words = ["pear", "Apple", "10", "9", "", "äpfel"]
    rows = "".join(f"{words[i % 6]},{i},{'ab'[i % 2]}\n" for i in range(60))
    result = read(tmp_path / "t.csv", "word,x,label\n" + rows)
    encoder = OrdinalEncoder().fit(np.array(words, object)[:, None])
    assert result.texts["word"] == tuple(encoder.categories_[0])
    wanted = encoder.transform(
        np.array(words, object)[result.train["numbers"][:, 0].astype(int) % 6, None]
    )
    np.testing.assert_array_equal(result.train["texts"][:, 0], wanted[:, 0] + 1)


def test_dates_booleans_and_columns_without_values(tmp_path: Path) -> None:
    rows = "".join(
        f"2020-01-{i + 1:02},{'true,' if i % 3 else ','},{'ab'[i % 2]}\n" for i in range(30)
    )
    result = read(tmp_path / "t.csv", "day,flag,nothing,label\n" + rows)
    assert (result.numbers, result.texts) == (("day", "flag"), {})
    assert set(result.train["numbers"][:, 1]) == {1}
    assert sorted(result.train["numbers"][:, 0] - 18262) == sorted(
        set(range(30)) - set(result.validation["numbers"][:, 0] - 18262)
    )
    result = read(tmp_path / "u.csv", "day,flag,nothing,label\n" + rows, column="day=text")
    assert list(result.texts) == ["day"]


def test_settings_replace_flags_in_errors() -> None:
    message = "x.csv: row 2: --column a=text, --quote none, or --encoding: expected, --splits none"
    assert _settings.in_settings(message) == (
        "x.csv: row 2: --set column=a=text, --set quote=none, or --set encoding: expected, "
        "--set splits=none"
    )


def test_rounding_of_large_numbers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{1_600_000_000_000 + 1000 * i},{i},{i % 2}\n" for i in range(20))
    (tmp_path / "t.csv").write_text(f"ms,x,label\n{rows}")
    table._read(str(tmp_path / "t.csv"), None, "auto", ())
    printed = capsys.readouterr().out
    assert "column 'ms' is rounded to float32 by up to 5.077e+04" in printed
    assert "column 'x'" not in printed
