"""The model builders, one file per family; `tfdist.models` lists their names."""
