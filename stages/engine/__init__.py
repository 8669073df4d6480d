"""Runs the language model: scheduler, model runner, KV pool and the sequences they work on."""
