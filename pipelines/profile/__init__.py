"""`python -m pipelines.profile`: measures how long each stage of reading takes."""
