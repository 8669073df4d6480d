"""Measures the structure of the code and the language of the documents."""
