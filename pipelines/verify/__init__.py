"""`python -m pipelines.verify`: is every byte of a folder what its index says?"""
