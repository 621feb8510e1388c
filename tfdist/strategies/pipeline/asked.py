"""What is asked of a pipeline: numbers, and names of layers, that go together."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.errors import ConfigurationError


def names(cut_at: str | Sequence[str] | None) -> list[str]:
    """Returns names of layers, from a text of them with commas between."""
    found = cut_at.split(",") if isinstance(cut_at, str) else list(cut_at or ())
    return [name.strip() for name in found]


def num_stages(stages: int | None, cut_at: Sequence[str]) -> int | None:
    """Returns how many stages are asked for, if any number is.

    Args:
        stages: As of `Pipeline`.
        cut_at: Names of layers.

    Raises:
        ConfigurationError: Numbers that are none, or do not go together.
    """
    if stages is not None:
        check_numbers(least=2, stages=stages)
    if cut_at and stages not in (None, len(cut_at) + 1):
        raise ConfigurationError(
            f"cut_at={','.join(cut_at)} makes {len(cut_at) + 1} stages, but stages={stages}: leave "
            "stages out."
        )
    return len(cut_at) + 1 if cut_at else stages


def check_numbers(least: int = 1, **numbers: object) -> None:
    """Checks numbers, by name.

    Raises:
        ConfigurationError: One is none, or below the least.
    """
    for name, value in numbers.items():
        if not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}={value!r}: expected a number from {least}.")
