"""Fetches media of requests, or decodes them from the body, and keeps them as files within limits."""
