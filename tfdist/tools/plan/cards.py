"""The cards that `tfdist plan auto` knows, with sources. Imports no TensorFlow."""

from __future__ import annotations

import re
from typing import NamedTuple

import psutil

from tfdist.console import units
from tfdist.errors import ConfigurationError, did_you_mean


class Card(NamedTuple):
    """An accelerator.

    Attributes:
        memory: Bytes.
        flops: Operations per second of matrix products in float32, or TF32, which TensorFlow uses
            from Ampere on; 0: unknown.
        half_flops: The same in 16 bits with float32 sums, dense.
        bandwidth: Bytes per second of its memory.
        inner: Bytes per second between the cards of a host, in one direction.
        price: Dollars per hour of one card, on demand; 0: unknown.
        source: Where the numbers are from.
    """

    memory: float
    flops: float = 0.0
    half_flops: float = 0.0
    bandwidth: float = 0.0
    inner: float = 32e9
    price: float = 0.0
    source: str = ""


#: Numbers are the maker's, of data sheets. Prices are list prices of AWS in us-east-1, divided by
#: the cards of the machine; they change, and `--price` replaces them.
CARDS = {
    "T4": Card(16e9, 8.1e12, 65e12, 320e9, 16e9, 0.53, "NVIDIA T4 data sheet; g4dn.xlarge"),
    "V100": Card(16e9, 15.7e12, 125e12, 900e9, 150e9, 3.06, "V100 data sheet; p3.2xlarge"),
    "A10G": Card(24e9, 62.5e12, 125e12, 600e9, 32e9, 1.01, "A10 data sheet; g5.xlarge"),
    "L4": Card(24e9, 60e12, 121e12, 300e9, 32e9, 0.80, "NVIDIA L4 data sheet; g6.xlarge"),
    "A100-40GB": Card(40e9, 156e12, 312e12, 1555e9, 300e9, 4.10, "A100 data sheet; p4d.24xlarge"),
    "A100-80GB": Card(80e9, 156e12, 312e12, 2039e9, 300e9, 5.12, "A100 data sheet; p4de.24xlarge"),
    "H100": Card(80e9, 494e12, 989e12, 3350e9, 450e9, 12.29, "H100 SXM data sheet; p5.48xlarge"),
    "H200": Card(141e9, 494e12, 989e12, 4800e9, 450e9, 0.0, "H200 SXM data sheet"),
    "RTX4090": Card(24e9, 82.6e12, 165e12, 1008e9, 32e9, 0.0, "NVIDIA Ada GPU architecture paper"),
}


def parsed(text: str) -> tuple[int, Card]:
    """Returns the number per host and the card that `2x24GB` or `8xH100` describes.

    Raises:
        ConfigurationError: The syntax is invalid, or there is no such card.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(.+)", text.strip())
    name = match[2] if match else ""
    number = int(match[1] or 1) if match else 1
    if name.upper() in CARDS:
        return number, CARDS[name.upper()]
    try:
        return number, Card(units.num_bytes(name))
    except ConfigurationError:
        raise ConfigurationError(
            f"--cards {text}: expected a number of cards per host and their memory or name, such "
            f"as 2x24GB or 8xH100, of {', '.join(CARDS)}.{did_you_mean(name.upper(), CARDS)}"
        ) from None


def of_this_host() -> str:
    """Returns the GPUs as `--cards` takes them, or the host's memory as one card.

    Raises:
        ConfigurationError: The GPUs are of a kind whose memory is unknown.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return f"1x{psutil.virtual_memory().available // 10**6}MB"
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "")
    for card in CARDS:
        if all(part in name.replace(" ", "").upper() for part in card.split("-")):
            return f"{len(gpus)}x{card}"
    raise ConfigurationError(
        f"--auto does not know the GPU {name!r}. Use tfdist plan auto --cards {len(gpus)}xSIZE."
    )
