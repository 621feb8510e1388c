"""The mathematics of one global batch: what a share contributes, and what the sums change."""
