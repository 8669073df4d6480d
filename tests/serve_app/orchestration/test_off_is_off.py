"""What is off runs no code: by default no role and no share of visual tokens follows the load.

A question without media runs none that is for media, adapters or traces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from epd.serve_app.llm import LLM
from tests.serve_app.server import wait_until

# Each runs once a second, or for a request or a report, where what it is for is on.
OPTIONAL = (
    "control/elasticity/", "control/retention.py", "orchestration/elastic.py",
    "orchestration/replica_advisor.py", "orchestration/replacement.py", "orchestration/retention.py",
    # For requests that have media, an adapter or a trace.
    "decoder/lora.py", "media/fleet_media.py", "observability/tracing.py", "reduction/reading.py",
    "requests/named_media.py",
)  # fmt: skip
_IDLE_S = 1.5  # longer than the interval between looks


@contextmanager
def files_run() -> Iterator[set[str]]:
    """The files whose functions run, in threads that start meanwhile."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    try:
        yield seen
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def optional_in(seen: set[str]) -> set[str]:
    """Those of the optional parts that have run."""
    return {part for part in OPTIONAL for name in list(seen) if part in Path(name).as_posix()}


ELASTIC = {"control/elasticity/", "orchestration/elastic.py"}
# It learns costs as elasticity does.
RETENTION = {
    "control/elasticity/", "control/retention.py", "orchestration/retention.py",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, set()), ({"elastic": True}, ELASTIC), ({"retention_min": 0.5, "slo_ttft_s": 1000.0}, RETENTION)],
    ids=["off", "elastic", "retention"],
)
def test_what_follows_the_load_runs_where_it_is_wanted(
    options: dict[str, object], expected: set[str]
) -> None:
    """In a server at rest, and for a question."""
    with files_run() as seen, LLM(topology="1e1p1d", **options) as llm:
        seen.clear()
        time.sleep(_IDLE_S)
        wait_until(lambda: not expected or optional_in(seen))  # a busy machine may look later
        at_rest = optional_in(seen)
        assert llm.ask((), "What is two plus two?", max_tokens=4).text
        wait_until(lambda: optional_in(seen) >= expected)
        assert (at_rest, optional_in(seen)) == (at_rest & expected, expected)
        assert bool(at_rest) == bool(expected), "each looks from time to time"
