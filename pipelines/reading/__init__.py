"""From a folder of shards to batches: order, division over workers, place in the epoch."""
