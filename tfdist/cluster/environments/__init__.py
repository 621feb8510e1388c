"""What each launcher tells its processes about the cluster: one file a launcher.

A file's `read(environ)` returns the `Cluster`, or None where its variables are not set.
"""
