"""`python -m pipelines.check`: does a folder give each record once an epoch, in its order?"""
