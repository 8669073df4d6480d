"""Answers the routes of the HTTP app."""
