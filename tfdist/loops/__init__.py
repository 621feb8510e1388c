"""The outer loop in plain Python: epochs, evaluation, prediction, and what feeds and paces them."""
