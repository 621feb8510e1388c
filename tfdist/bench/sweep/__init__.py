"""`python -m tfdist.bench sweep`: throughput over the batch size."""
