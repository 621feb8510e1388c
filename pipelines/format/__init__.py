"""What lies in a folder of shards: records, their framing and features, the index beside them."""
