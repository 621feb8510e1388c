"""`python -m tfdist.bench strategies`: one network under every strategy that there is here."""
