"""Gives answers the forms of OpenAI's JSON, whole and as events."""
