"""A batch passes the files that docs/how_it_works.md names, and no others than known leaves."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.life_of_a_batch import LEAVES, ROOT, WAY
from tests.support import ROOT as CHECKOUT
from tests.support.starting import run


def test_fit_runs_known_files_only() -> None:
    run(sys.executable, "-m", "tests.life_of_a_batch", "--check", cwd=CHECKOUT)


def test_known_files_exist_and_those_on_the_way_are_described() -> None:
    assert not [name for name in (*WAY, *LEAVES) if not Path(ROOT, name).exists()]
    page = (CHECKOUT / "docs" / "how_it_works.md").read_text()
    assert not [name for name in WAY if name not in page]
