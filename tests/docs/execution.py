"""Runs the examples of docstrings and the Python blocks of pages.

`python -m tests.docs.execution NAME|PAGE ...` runs those of public names and of pages in a new
process: some need a TensorFlow that has not started, Horovod, or start other processes. It prints
how many statements or blocks of each ran, as JSON.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.docs.code_blocks import API, blocks, common_names
from tests.support import ROOT


def namespace() -> dict[str, Any]:
    """Returns the names that all examples may use; the working folder gets `my_package.py`."""
    Path("my_package.py").write_text(common_names())
    # Workers receive the functions of a `__main__` by value, so examples look like one.
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(common_names(), names)
    exec(blocks(API)[1].code, names)
    return names


def run_page(page: Path) -> int:
    """Runs the blocks of a page in order, and returns how many ran."""
    names, ran = namespace(), 0
    with mock.patch.object(sys, "argv", [page.name]):
        for block in blocks(page):
            if block.reason:
                continue
            exec(block.before, names)
            # Errors name the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)
            ran += 1
    return ran


def run_docstring(name: str) -> int:
    """Runs the examples of a public name, and returns how many statements ran.

    Raises:
        AssertionError: An example fails, or prints something else.
    """
    test = doctest.DocTestParser().get_doctest(
        public(name).__doc__ or "", namespace(), name, None, None
    )
    report = io.StringIO()
    with contextlib.redirect_stderr(report):
        failed, tried = doctest.DocTestRunner(verbose=False).run(test, out=report.write)
    assert not failed, report.getvalue()
    return tried


def public(name: str) -> Any:
    """Returns the object of a dotted name: a module, or something in one."""
    module, *rest = name.split(".")
    result: Any = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        with contextlib.suppress(AttributeError):
            result = getattr(result, part)
            continue
        result = importlib.import_module(module)
    return result


def main(names: list[str]) -> int:
    """Runs the examples of each name or page, and returns 1 if one failed."""
    ran, failed = {}, False
    for name in names:
        page = ROOT / name
        try:
            ran[name] = run_page(page) if page.is_file() else run_docstring(name)
        except AssertionError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps(ran))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
