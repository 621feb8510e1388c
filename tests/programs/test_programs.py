"""Programs and random models give the same results in a Trainer as in plain Keras on one device."""

from __future__ import annotations

import pytest

from tests.conformance import results
from tests.programs import engines
from tests.programs.programs import PROGRAMS
from tests.studies.random_programs import differences_of, draw_recipe
from tfdist.errors import TfdistError

# `make check` runs the quick ones, `make conformance` all.
PARAMETERS = [
    pytest.param(name, marks=[] if program.quick else [pytest.mark.long])
    for name, program in PROGRAMS.items()
]


@pytest.mark.parametrize("name", PARAMETERS)
def test_program_equals_one_device(name: str) -> None:
    """Weights, optimizer, history, evaluation and predictions, or a refusal."""
    program = PROGRAMS[name]
    try:
        result = engines.tfdist(program, "mirrored", 2)
    except TfdistError:
        if not program.may_refuse:
            raise
        return
    differences = results.compare(result, engines.reference(name), program)
    assert not differences, "\n".join(map(str, differences))


@pytest.mark.parametrize(
    "number", [*range(10), *(pytest.param(n, marks=pytest.mark.long) for n in range(10, 40))]
)
def test_random_model_equals_one_device(number: int) -> None:
    """`python -m tests.studies.random_programs` tries a thousand."""
    recipe = draw_recipe(0, number)
    assert not differences_of(recipe), recipe
