"""`python -m pipelines.show`: prints the contents of a folder and draws a contact sheet."""
