"""Attacks on a training and on what reads its files, and what becomes of them.

`python -m tests.attacks` runs all of them and prints a table. Attacks that other tests make are
run as these tests; workers that drift apart are started here.
"""
