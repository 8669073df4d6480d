"""Runs the program `epd`: `python -m epd ask clip.mp4 "What happens?"`."""

import signal

# While Python imports the program, Ctrl-C ends the process as it ends any other: without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from epd.serve_app.cli.program import main

if __name__ == "__main__":
    main()
