"""The doctor's lines on installed packages."""

from __future__ import annotations

from importlib import metadata

import pytest

from tfdist.tools.doctor import host
from tfdist.tools.doctor.report import Check

NEEDED = ["numpy>=2,<3", "keras>=3.15,<3.16", "somelib>=1", "torch>=2; extra == 'others'"]
FOUND = {"numpy": "2.4.6", "keras": "3.14.0"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in FOUND:
            raise metadata.PackageNotFoundError(name)
        return FOUND[name]

    monkeypatch.setattr(metadata, "requires", lambda _: NEEDED)
    monkeypatch.setattr(metadata, "version", version)


def lines() -> dict[str, Check]:
    return {check.name: check for check in host.library_checks()}


def test_compatible_versions_pass() -> None:
    assert lines()["numpy"] == Check("numpy", "2.4.6")


def test_incompatible_version_reports_the_requirement() -> None:
    check = lines()["keras"]
    assert check.state == "wrong"
    assert check.value.startswith("3.14.0, but tfdist needs ")
    assert check.fix == "pip install 'keras<3.16,>=3.15'"


def test_untested_version_is_named_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FOUND, "tensorflow", "2.99.0")
    assert lines()["tensorflow"] == Check("tensorflow", "2.99.0 (tested: 2.18 to 2.21)")


def test_missing_package_fails_unless_it_is_optional() -> None:
    assert lines()["somelib"] == Check(
        "somelib", "not installed", "wrong", "pip install 'somelib>=1'"
    )
    assert "torch" not in lines()


def test_uninstalled_tfdist_still_names_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert {"python", "tfdist", "tensorflow", "keras", "numpy"} == set(lines())
