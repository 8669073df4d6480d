"""Parses and checks HTTP requests, and builds and streams responses."""
