"""Trainings that are killed at random moments, and what becomes of them.

    python -m tests.faults             # kills, saves, stalls: adds to faults.jsonl
    python -m tests.faults kills --strategy mirrored --runs 5
    python -m tests.faults --table     # tfdist/checkpoint/FAULTS.md, from faults.jsonl

A process takes seconds to import TensorFlow, and is killed many times: what is killed is forked
from one that has imported TensorFlow, has not started it, and has one thread.
"""
