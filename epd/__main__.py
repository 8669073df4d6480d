"""Runs the program `epd`: `python -m epd ask clip.mp4 "What happens?"`."""

from epd.serve_app.cli.program import main

if __name__ == "__main__":
    main()
