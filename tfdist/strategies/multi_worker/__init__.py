"""TensorFlow's collectives between workers that each run the script."""
