"""Programs as people write them, small, and whether a Trainer gives the numbers of one device.

A program (`program.py`) is a case of a family (`vision.py`, `text.py`, ...): a model and what a
user does with it. All that it leaves behind is compared: weights, history, evaluation, the
optimizer's state and predictions; in float64, so that rounding hides nothing.
"""
