"""Writes examples to a folder of shards with an index, atomically."""
