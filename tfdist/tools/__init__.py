"""Commands beside training; `tfdist` lists them."""
