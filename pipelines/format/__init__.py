"""The storage format: TFRecord framing, the features of a record, and the index of a folder."""
