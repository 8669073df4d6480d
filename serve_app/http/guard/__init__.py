"""Guards the HTTP app: who may ask, how large and how slowly."""
