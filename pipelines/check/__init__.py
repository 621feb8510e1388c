"""`python -m pipelines.check`: checks that workers read each record exactly once per epoch."""
