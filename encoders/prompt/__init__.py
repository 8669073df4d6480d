"""Messages to tokens and positions."""
