"""Many questions about many media, from a file: policy and files of `epd batch`, without a model."""
