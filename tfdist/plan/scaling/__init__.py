"""`python -m tfdist.plan scaling`: step time and efficiency over the number of workers."""
