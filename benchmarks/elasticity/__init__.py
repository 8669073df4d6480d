"""Measures how roles and replicas follow traffic."""
