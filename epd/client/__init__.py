"""Asks servers of the OpenAI chat API."""
