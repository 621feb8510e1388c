"""`python -m pipelines.show`: what is in a folder, as a table and as pictures."""
