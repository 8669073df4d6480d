"""Answers files of questions about many media: policy and files of `epd batch`, without a model."""
