"""Several CPU devices for every test: replicas need somewhere to be."""

from __future__ import annotations

from tests import start_tensorflow

start_tensorflow()
