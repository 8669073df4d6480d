"""Computes the layers of text models, from merged matrices or with the modules of transformers."""
