"""Reads folders of shards as batches: `read`, `mix`, and one module per stage."""
