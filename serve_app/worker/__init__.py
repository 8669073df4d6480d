"""One worker: its stages behind messages, whatever carries them."""
