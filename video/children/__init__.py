"""Reads and decodes media in child processes without secrets and within limits."""
