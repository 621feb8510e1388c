"""The outer loop in plain Python: training, evaluation and prediction, and what feeds them."""
