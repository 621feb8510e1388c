"""`python -m pipelines.verify`: checks every record of a folder against its index."""
