"""Tables on terminals of any width, and sizes as text."""

from __future__ import annotations

import pytest
from rich.console import Console

from tfdist.console import tables, units
from tfdist.errors import ConfigurationError


def test_rows_become_paragraphs_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "_console", Console(width=80, highlight=False, markup=False))
    name = "step-00000000000000000123-of-epoch-00000000000000000007"
    tables.numbers(["checkpoint", "written, logs", "size"], [[name, "loss 0.25, " * 6, "12 MB"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == name
    assert max(map(len, lines)) <= 80
    assert "written, logs loss 0.25" in lines[1]
    assert lines[-1].rstrip().endswith("size 12 MB")


def test_headings_wrap_before_names_and_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "_console", Console(width=80))
    headings = ["strategy", "device", *("gradients " * 6).split()]
    row = ["parameter_server", "parameter device", *["46.8 MB"] * 6]
    tables.numbers(headings, [row], num_names=2)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (line,) = (line for line in lines if "parameter_server" in line)
    assert line.count("46.8 MB") == 6


def test_sizes_are_parsed_and_formatted() -> None:
    assert units.num_bytes("24GB") == 24 * 10**9
    assert units.num_bytes("1.5 GiB") == 3 << 29
    assert units.num_bytes("512") == 512
    assert units.num_bytes("3G") == 3 * 10**9
    assert units.format_bytes(1_440_000_000) == "1.44 GB"
    assert units.format_bytes(16_000_000) == "16 MB"


def test_rates_are_in_bits_or_bytes() -> None:
    assert units.bytes_per_second("25Gb") == 25e9 / 8
    assert units.bytes_per_second("100Mbit/s") == 100e6 / 8
    assert units.bytes_per_second("3GB") == 3e9


@pytest.mark.parametrize("text", ["24Gb", "much", "-1GB"])
def test_invalid_size_raises(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a size like"):
        units.num_bytes(text)


@pytest.mark.parametrize("text", ["25G", "0Gb", "fast"])
def test_invalid_rate_raises(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a bandwidth"):
        units.bytes_per_second(text)
