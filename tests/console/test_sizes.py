"""Parsing and formatting of sizes and rates."""

from __future__ import annotations

import pytest

from tfdist.console import sizes
from tfdist.errors import ConfigurationError


def test_sizes_are_parsed_and_formatted() -> None:
    assert sizes.num_bytes("24GB") == 24 * 10**9
    assert sizes.num_bytes("1.5 GiB") == 3 << 29
    assert sizes.num_bytes("512") == 512
    assert sizes.num_bytes("3G") == 3 * 10**9
    assert sizes.format_bytes(1_440_000_000) == "1.44 GB"
    assert sizes.format_bytes(16_000_000) == "16 MB"


def test_rates_are_in_bits_or_bytes() -> None:
    assert sizes.bytes_per_second("25Gb") == 25e9 / 8
    assert sizes.bytes_per_second("100Mbit/s") == 100e6 / 8
    assert sizes.bytes_per_second("3GB") == 3e9


@pytest.mark.parametrize("text", ["24Gb", "much", "-1GB"])
def test_invalid_size_raises(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a size like"):
        sizes.num_bytes(text)


@pytest.mark.parametrize("text", ["25G", "0Gb", "fast"])
def test_invalid_rate_raises(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a bandwidth"):
        sizes.bytes_per_second(text)
