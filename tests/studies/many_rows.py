"""`python -m tests.studies.many_rows`: recipe `table` on ten million rows, against scikit-learn.

Writes a Parquet file of `--rows` rows, and compares means, scales, class weights, vocabularies and
labels. It takes some minutes and 8 GB of memory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_class_weight

from recipes import _class_folders, table
from tfdist.config import TrainConfig


def main() -> None:
    """Runs the comparison, and raises `AssertionError` if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    num_rows = parser.parse_args().rows
    rng = np.random.default_rng(0)
    columns = {
        "year": rng.integers(2000, 2021, num_rows),
        "price": rng.normal(1e5, 5e3, num_rows),
        "city": np.array(["Bern", "Genf", "Zürich"])[rng.integers(0, 3, num_rows)],
        "label": rng.integers(5, 15, num_rows),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.parquet")
        parquet.write_table(pa.table(columns), path)
        result = table._table(TrainConfig(data=str(path)))
    assert result.classes == tuple(map(str, range(5, 15)))
    assert result.texts == {"city": ("Bern", "Genf", "Zürich")}
    exact = StandardScaler().fit(result.train["numbers"].astype("float64"))
    scaler = table.statistics(result.train["numbers"])
    np.testing.assert_allclose(scaler.mean_, exact.mean_, rtol=1e-11)
    np.testing.assert_allclose(scaler.scale_, exact.scale_, rtol=1e-9)
    labels = result.train["label"]
    weights = compute_class_weight("balanced", classes=np.arange(10), y=labels)
    np.testing.assert_allclose(
        _class_folders.balanced_weights(np.bincount(labels)), weights, rtol=1e-6
    )
    numbers = f"mean {scaler.mean_}, scale {scaler.scale_}"
    print(f"{len(labels):,} training rows have the numbers of scikit-learn: {numbers}")


if __name__ == "__main__":
    main()
