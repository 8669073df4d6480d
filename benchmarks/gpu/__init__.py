"""Checks and measures the pipeline on one GPU, without PyAV and without Ray."""
