"""Records the outcome of every request in one table of fixed-size rows, so that a million fit in memory."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from epd.simulate.clock import TICKS_PER_S
from epd.simulate.requests import RequestState
from epd.workload.metrics import SLO

# Times in ticks; -1 for events that have not happened.
ROW = np.dtype(
    [
        ("index", "i8"), ("due", "i8"), ("placed", "i8"), ("media_read", "i8"), ("encoded", "i8"),
        ("first_token", "i8"), ("adopted", "i8"), ("end", "i8"), ("encode_ticks", "i8"),
        ("prefill_ticks", "i8"), ("prompt_tokens", "i4"), ("cached_tokens", "i4"), ("output_tokens", "i4"),
        ("is_refused", "?"),
    ]
)  # fmt: skip
_BUFFER_ROWS = 2**14


class RecordTable:
    """Holds rows in the order in which requests ended.

    Rows beyond the buffer go to an unnamed file, so that memory does not grow with the number of requests.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._length = 0

    @cached_property
    def _buffer(self) -> NDArray[np.void]:
        return np.zeros(_BUFFER_ROWS, ROW)

    def __len__(self) -> int:
        return self._length

    def add(self, state: RequestState, end: int, *, is_refused: bool = False) -> None:
        place = self._length % len(self._buffer)
        if self._length and not place:
            self._spill()
        job = state.job
        self._buffer[place] = (
            job.index, job.due, state.placed, state.media_read, state.encoded, state.first_token,
            state.adopted, end, state.encode_ticks, state.prefill_ticks, job.num_prompt_tokens,
            max(state.num_cached, 0), job.output_tokens, is_refused,
        )  # fmt: skip
        self._length += 1

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the table
        self._file.write(self._buffer.tobytes())

    def rows(self) -> NDArray[np.void]:
        """Returns rows by index of the request and closes the table; long runs stay in a file until used."""
        rest = self._buffer[: self._length - self._num_spilled]
        if self._file is None:
            return rest[np.argsort(rest["index"], kind="stable")]
        with self._file as file:
            file.flush()
            spilled = np.memmap(file, ROW, "r", shape=(self._num_spilled,))
        indices = np.concatenate([spilled["index"], rest["index"]])
        places = np.empty(self._length, np.int64)
        places[np.argsort(indices, kind="stable")] = np.arange(self._length)
        with tempfile.TemporaryFile() as ordered:
            ordered.truncate(self._length * ROW.itemsize)
            rows: NDArray[np.void] = np.memmap(ordered, ROW, "r+", shape=(self._length,))
        for start in range(0, self._num_spilled, len(self._buffer)):
            stop = start + len(self._buffer)
            rows[places[start:stop]] = spilled[start:stop]
        rows[places[self._num_spilled :]] = rest
        return rows

    @property
    def _num_spilled(self) -> int:
        """Returns the rows in the file: whole buffers, except the last one that is filled."""
        return max(0, self._length - 1) // len(self._buffer) * len(self._buffer)


def _seconds(ticks: Any) -> NDArray[np.float64]:
    return np.asarray(ticks, np.float64) / TICKS_PER_S


@dataclass(frozen=True, slots=True)
class WorkSpan:
    """Records an action of a worker, for a trace. Times in ticks."""

    worker: str
    name: str
    start: int
    ticks: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Holds a simulation's results.

    rows: see ROW
    spans: only where they were requested
    switches: (seconds, worker, new roles)
    num_groups, num_encoded: groups of media that requests had, and those of them that were encoded
    num_held: drafted tokens that held
    """

    rows: NDArray[np.void]
    num_events: int
    num_preempted: int
    switches: tuple[tuple[float, str, str], ...] = ()
    spans: tuple[WorkSpan, ...] = ()
    num_groups: int = 0
    num_encoded: int = 0
    num_held: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Returns the mean tokens of a decode pass of a request, 1 without drafts; 0 without decodes."""
        num_tokens = int(self.rows["output_tokens"].sum()) - len(self.rows)
        return num_tokens / (num_tokens - self.num_held) if num_tokens else 0.0

    def seconds(self, start: str, stop: str) -> NDArray[np.float64]:
        """Returns the seconds from one moment to another, of the requests for which both have come."""
        rows = self.rows[(self.rows[start] >= 0) & (self.rows[stop] >= 0) & ~self.rows["is_refused"]]
        return _seconds(rows[stop] - rows[start])

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        return self.seconds("due", "first_token")

    @property
    def e2e_s(self) -> NDArray[np.float64]:
        return self.seconds("due", "end")

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        rows = self.rows[(self.rows["output_tokens"] > 1) & ~self.rows["is_refused"]]
        return _seconds((rows["end"] - rows["first_token"]) / (rows["output_tokens"] - 1))

    def attainment(self, slo: SLO) -> float:
        """Returns the share of all requests that met the objectives; refused ones did not."""
        rows = self.rows
        good = ~rows["is_refused"]
        num_gaps = np.maximum(rows["output_tokens"] - 1, 1)
        for limit_s, ticks in (
            (slo.ttft_s, rows["first_token"] - rows["due"]),
            (slo.tpot_s, (rows["end"] - rows["first_token"]) / num_gaps),
            (slo.e2e_s, rows["end"] - rows["due"]),
        ):
            if limit_s is not None:
                good &= ticks <= limit_s * TICKS_PER_S
        return float(good.mean())
