"""Measures the server's front: its cost a request and a token, its streams, and the ways of messages."""
