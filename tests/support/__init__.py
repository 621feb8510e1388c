"""What several tests use: small data, small models, processes to start."""

from pathlib import Path

#: The checkout: where commands are run.
ROOT = Path(__file__).parents[2]
