"""Contains one file for each model family."""
