"""Studies and comparisons with other libraries. Not part of the wheel."""
