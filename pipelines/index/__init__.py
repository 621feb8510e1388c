"""`python -m pipelines.index`: makes the index of shards that others wrote."""
