"""In which order data come, pass after pass, and how they begin at any batch of any pass."""
