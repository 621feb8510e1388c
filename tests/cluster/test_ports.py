"""Ports that are reserved first and used later."""

from __future__ import annotations

import random
import socket

from tfdist.cluster.networks import free_ports, reserved_ports


def test_reserved_ports_are_not_reused() -> None:
    with reserved_ports(50) as held:
        assert len(set(held)) == 50
        assert not set(held) & set(free_ports(50))
    with socket.create_server(("", held[0])):
        pass


def test_equal_seeds_choose_different_ports() -> None:
    random.seed(1)
    first = free_ports(5)
    random.seed(1)
    assert free_ports(5) != first
