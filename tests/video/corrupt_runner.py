"""Tries each file of a folder, as a server would, and writes one line of JSON about it: what came of it.

Run as a process of its own, so that its death or its hanging is seen from outside: FOLDER [FIRST NAME].
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from epd import video
from epd.errors import EPDError
from epd.video.containers.limits import Limits
from epd.video.decoding.pixels import exact_resize

# A file is opened within milliseconds of CPU time, but the process may have to wait for a core.
LIMITS = Limits(max_gop_s=2.0, max_file_s=4.0, open_timeout_s=30.0, max_duration_s=7200.0)


def outcome(path: Path) -> str:
    """Typed error, or how many frames came, or what else went wrong."""
    try:
        if video.media_kind(path) == "image":
            return f"image {video.load_image(path).shape}"
        info = video.probe(path, limits=LIMITS)
        times_s = video.sample_times(info, fps=2, max_frames=12) if info.num_frames else [0.0, 0.5, 1.0]
        with video.stream(path, times_s, size=(28, 28), group_size=4, limits=LIMITS) as groups:
            parts = [group.frames for group in groups]
        substituted = sum(part.num_substituted for part in parts)
        return f"{sum(map(len, parts))} frames, {substituted} substituted"
    except EPDError as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - it is what the test looks for
        return f"untyped {type(error).__name__}: {error}"


def main() -> None:
    names = sorted(path.name for path in Path(sys.argv[1]).iterdir())
    first = sys.argv[2] if len(sys.argv) > 2 else ""
    exact_resize(np.zeros((8, 8, 3), np.uint8), (4, 4))  # imports, which take seconds
    for name in names:
        if name >= first:
            print(json.dumps({"begin": name}), flush=True)
            began = time.process_time()
            result = outcome(Path(sys.argv[1]) / name)
            cpu_s = time.process_time() - began
            print(json.dumps({"name": name, "result": result, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
