"""The Python loops around the steps: training, evaluation, prediction, and their data."""
