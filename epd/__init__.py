"""Contains nouns, policy and planning of the EPD pipeline: no Ray, no PyAV, no Triton."""

__version__ = "0.1.0"
