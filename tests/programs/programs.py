"""All programs, by name."""

from __future__ import annotations

from tests.programs import (  # noqa: F401 - importing registers the programs
    applications,
    audio,
    generative,
    graph,
    guides,
    large_batch,
    layers,
    losses,
    networks,
    reinforcement,
    series,
    tables,
    text,
    threads,
    vision,
)
from tests.programs.program import PROGRAMS

__all__ = ["PROGRAMS"]
