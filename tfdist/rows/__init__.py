"""May the rows of a batch be split? The static analysis of traced graphs."""
