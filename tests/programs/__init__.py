"""Small versions of real programs, which must train to the numbers of one device.

A program (`program.py`) is a case of a family (`vision.py`, `text.py`, ...): a model and what a
user does with it. All results are compared: weights, history, evaluation, optimizer state and
predictions; in float64, in which rounding hides no error.
"""
