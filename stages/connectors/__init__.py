"""Transports embeddings and keys and values, behind `epd.transfer.connectors.Connector`."""
