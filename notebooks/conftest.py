"""Which notebooks `make check` runs as notebooks; `make long` runs all.

The cells of most run in `tests/test_notebooks.py` without a kernel, which is quicker.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Beginnings of their names.
QUICK = ("06",)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks those that are left to `make long`, and leaves out what needs Horovod without it."""
    if item.path.parent != HERE:
        return
    if not item.path.name.startswith(QUICK):
        item.add_marker(pytest.mark.long)
    if "horovod" in item.path.name and importlib.util.find_spec("horovod") is None:
        item.add_marker(pytest.mark.skip("Horovod is not installed: make horovod"))
