"""Helpers that several tests share: small data sets, small models, and subprocesses."""

from pathlib import Path

#: Root of the checkout, where commands run.
ROOT = Path(__file__).parents[2]
