"""Defines the JSON of requests, and turns it into the types of the pipeline."""
