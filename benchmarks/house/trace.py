"""Traces which files run, and which records are made, while one question is answered.

    python -m benchmarks.house.trace [--topology 1e1p1d] [--names]

Loads the embedded model behind the application in this process and asks three questions: about a new video,
the same again, and six words without a video. Files that run while nothing is asked are counted apart.
Media are decoded in children, whose files are not seen. Prints a table in Markdown, with --names the files
and records of each question too.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.reporting import table

_ROOT = Path(__file__).resolve().parents[2]
_IDLE_S = 3.0
_SETTLED_S = 0.5


@dataclass(slots=True)
class Seen:
    """Holds what has run since it was cleared: files by path, and types of dataclasses that were made."""

    files: set[str] = field(default_factory=set)
    records: set[str] = field(default_factory=set)
    _known: dict[str, str | None] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename not in self._known:
            self._known[code.co_filename] = _ours(code.co_filename)
        if (path := self._known[code.co_filename]) is not None:
            self.files.add(path)
        elif code.co_name == "__init__" and code.co_filename == "<string>":
            kind = type(frame.f_locals.get("self"))
            if is_dataclass(kind) and kind.__module__.startswith("epd"):
                self.records.add(kind.__qualname__)

    def during(self, work: Callable[[], object]) -> dict[str, list[str]]:
        """Returns the files and types of records that a piece of work needs, once the one before is over."""
        time.sleep(_SETTLED_S)
        self.files.clear()
        self.records.clear()
        work()
        return {"files": sorted(self.files), "record types": sorted(self.records)}


def _ours(name: str) -> str | None:
    path = Path(name).resolve()
    is_product = (
        path.suffix == ".py" and path.is_relative_to(_ROOT) and not {".venv", "benchmarks"} & set(path.parts)
    )
    return str(path.relative_to(_ROOT)) if is_product else None


def traced(topology: str) -> dict[str, dict[str, list[str]]]:
    """Returns what each question needs."""
    seen = Seen()
    threading.setprofile(seen)  # of threads that start from now on: workers, HTTP, planning
    from epd.serve_app.llm import LLM
    from epd.shapes import make_scene
    from epd.video.demo_video import write_demo_video

    with tempfile.TemporaryDirectory() as folder, LLM(topology=topology) as llm:
        clip = Path(folder) / "clip.mp4"
        write_demo_video(clip, make_scene(7, 30.0), fps=8, height=180, width=320)
        works: dict[str, Callable[[], object]] = {
            f"nothing for {_IDLE_S:g} s": lambda: time.sleep(_IDLE_S),
            "a new video": lambda: llm.ask(clip, "Which shape appears first?"),
            "a second question about it": lambda: llm.ask(clip, "Which shape appears last?"),
            "six words": lambda: llm.ask([], "What is two plus two here?"),
        }
        return {name: seen.during(work) for name, work in works.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--topology", default="1e1p1d")
    parser.add_argument("--names", action="store_true")
    options = parser.parse_args()
    found = traced(options.topology)
    threading.setprofile(None)
    rows = [
        {"what": name, **{kind: len(each) for kind, each in seen.items()}} for name, seen in found.items()
    ]
    print(table(rows))
    if options.names:
        for name, seen in found.items():
            for kind, each in seen.items():
                print(f"\n{kind} of {name}:", *each, sep="\n  ")


if __name__ == "__main__":
    main()
