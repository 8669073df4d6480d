"""Serves the pipeline, on Ray Serve or in one process; the only package that imports Ray."""
