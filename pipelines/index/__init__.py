"""`python -m pipelines.index`: creates the index of shards that other tools wrote."""
