"""Computes attention over paged keys and values, on the host and on a GPU."""
