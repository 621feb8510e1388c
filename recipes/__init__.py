"""Workloads, one module each; run one with `python -m tfdist.train --recipe NAME`."""
