"""Metrics, traces and one line for each request."""
