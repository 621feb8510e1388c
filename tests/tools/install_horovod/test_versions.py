"""The installed Horovod, and the TensorFlow for which it was built."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tfdist.tools.install_horovod import versions


@pytest.fixture
def horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed Horovod that was built against TensorFlow 2.20.0."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    record = tmp_path / "horovod" / "metadata.json"
    record.write_text(json.dumps({"tensorflow": "2.20.0", "dummy": "none"}))
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)  # another test may have imported it
    return record


def test_reads_the_tensorflow_version_without_import() -> None:
    import tensorflow as tf

    assert versions.tensorflow() == tf.__version__


def test_horovod_for_another_tensorflow_is_incompatible(
    horovod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert versions.horovod() == "0.28.1"
    assert versions.horovod_was_built_for() == "2.20.0"
    assert not versions.horovod_fits()
    monkeypatch.setattr(versions, "tensorflow", lambda: "2.20.0")
    assert versions.horovod_fits()


def test_horovod_without_tensorflow_is_incompatible(horovod: Path) -> None:
    horovod.write_text("{}")
    assert versions.horovod_was_built_for() is None
    assert not versions.horovod_fits()
