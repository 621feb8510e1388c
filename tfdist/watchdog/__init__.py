"""Ends a run whose workers wait for one that will not come, and says for which.

Every worker tells rank 0 once a second how far it is, and rank 0 tells all. `pulse` holds what a
worker tells, `hub` and `guest` carry it, `verdict` judges, `ending` ends, and `watch` is what the
trainer uses.
"""
