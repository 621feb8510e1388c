"""The builders, a file a family; `tfdist.models` has their names."""
