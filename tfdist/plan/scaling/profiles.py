"""What a worker's step takes: measured here, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

from tfdist.console import files
from tfdist.errors import ConfigurationError
from tfdist.plan import real_steps
from tfdist.plan.network import Network
from tfdist.plan.scaling.exchange import Profile

#: Steps that are timed, after two that compile and find their pace.
_NUM_STEPS = 5


def measure(network: Network, batch: int) -> Profile:
    """Trains for some steps in a process of its own, which exchanges nothing.

    Args:
        network: What is trained.
        batch: Rows of a step.

    Raises:
        LaunchError: The training failed.
    """
    with real_steps.pool() as pool:
        (sample,) = pool.ask(network, batch, "one_device", 1, _NUM_STEPS)
    return Profile(sample.seconds, sample.gradient_bytes)


def read(path: str) -> Profile:
    """Returns what `write` wrote.

    Raises:
        ConfigurationError: There is no such file, or it holds something else.
    """
    try:
        profile = Profile(**json.loads(Path(path).read_text("utf-8")))
        if min(profile) >= 0 < profile.seconds:
            return profile
    except (OSError, ValueError, TypeError):
        pass
    raise ConfigurationError(
        f"--profile {path}: expected a file like that of --save-profile, with the numbers "
        f"{', '.join(Profile._fields)}."
    )


def write(profile: Profile, path: str) -> None:
    """Writes a profile as JSON."""
    with files.replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(profile._asdict(), indent=1) + "\n")
