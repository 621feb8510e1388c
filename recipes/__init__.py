"""Workloads: one module each, found by its name with `python -m tfdist.train --recipe NAME`."""
