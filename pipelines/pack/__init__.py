"""`python -m pipelines.pack`: packs images, tables, arrays or text into shards."""
