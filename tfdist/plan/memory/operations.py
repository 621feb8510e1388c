"""What a graph consists of, as a plan sees it. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: An output of an operation: its name and the output's number.
Output = tuple[str, int]


class Operation(NamedTuple):
    """An operation of a graph.

    Attributes:
        kind: Its type, like `Conv2D`.
        inputs: What it reads.
        after: Names of operations that it waits for without reading anything of theirs.
        sizes: Bytes of each of its outputs.
        shares: Whether its outputs are its first input, seen otherwise (`Reshape`).
        overwrites: Whether it may write over an input of the same size.
        elsewhere: Whether what it makes is held anyway, as a variable is.
        device: Where it is computed; empty: there is one.
        workspaces: Bytes of each buffer that it takes while it computes.
        work: Multiplications, of those that take long; 0: of all others.
    """

    kind: str
    inputs: Sequence[Output]
    after: Sequence[str]
    sizes: Sequence[int]
    shares: bool = False
    overwrites: bool = False
    elsewhere: bool = False
    device: str = ""
    workspaces: Sequence[int] = ()
    work: float = 0.0


class Moment(NamedTuple):
    """An operation begins, or ends and lets go of what it read."""

    name: str
    begins: bool
