"""Sends open-loop traffic to any server of the OpenAI chat API, and measures it."""
