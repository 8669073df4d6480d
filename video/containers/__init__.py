"""Reads what a container claims, and holds it against its bytes."""
