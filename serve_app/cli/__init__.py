"""The program `epd`: one module for each command; it parses, calls and prints."""
