"""`tfdist bench`: benchmarks to run on your own machines."""
