"""`python -m pipelines.pack`: turns photographs, tables, arrays or text into shards."""
