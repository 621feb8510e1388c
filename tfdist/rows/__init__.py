"""May the rows of a batch be split? Static analysis of the traced model; `Rows` is the door."""

from tfdist.rows.reductions import NotReducibleError, Reduction, Reductions
from tfdist.rows.rows import Rows
from tfdist.rows.traced import TracedForward, refused_assignment

__all__ = [
    "NotReducibleError",
    "Reduction",
    "Reductions",
    "Rows",
    "TracedForward",
    "refused_assignment",
]
