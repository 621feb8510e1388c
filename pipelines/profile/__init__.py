"""`python -m pipelines.profile`: which stage of reading takes the time."""
