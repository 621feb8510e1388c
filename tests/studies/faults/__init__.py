"""Fault injection: training runs that are killed at random moments.

    python -m tests.studies.faults             # kills, saves, stalls: appends to faults.jsonl
    python -m tests.studies.faults kills --strategy mirrored --runs 5
    python -m tests.studies.faults --table    # writes tfdist/checkpoint/FAULTS.md from faults.jsonl

Importing TensorFlow takes seconds, and processes are killed many times. They are therefore forked
from a single-threaded process that has imported TensorFlow without initializing it.
"""
