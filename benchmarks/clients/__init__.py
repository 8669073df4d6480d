"""Third-party clients and load generators that ask our server, in environments of their own."""
