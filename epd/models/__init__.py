"""The embedded model, shipped as package data."""

from pathlib import Path


def embedded_model_path() -> Path:
    """The folder of `shapes-vl`: weights, tokenizer, chat template and processor configuration."""
    return Path(__file__).parent / "shapes-vl"
