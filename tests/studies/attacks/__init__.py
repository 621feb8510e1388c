"""Attacks on training runs and on the code that reads their files, with the outcome of each.

`python -m tests.studies.attacks` runs all of them and prints a table. Most attacks are tests
elsewhere, and the table runs these tests. The attacks of one worker on the other are here.
"""
