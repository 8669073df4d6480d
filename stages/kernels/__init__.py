"""Contains Triton kernels of the language model, each beside a plain torch twin that defines its result."""
