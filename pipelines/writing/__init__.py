"""From examples to a folder of shards with its index, whole or not at all."""
