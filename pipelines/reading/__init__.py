"""From a folder of shards to batches: `read` and `mix`, and a file for each of their stages."""
