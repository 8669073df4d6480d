"""Which encoder takes which groups, what is encoded together and what the encoder cache keeps."""
