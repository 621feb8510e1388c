"""What lies in a folder of shards: files of framed records, their features, the index beside."""
