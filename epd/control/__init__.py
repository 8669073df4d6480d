"""Decides on requests and workers: admission, distribution of work, and blame."""
