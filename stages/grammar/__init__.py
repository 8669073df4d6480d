"""Holds answers to a grammar: which tokens may come next, and what a client may ask for."""
