"""Estimates whether decode workers have room, so that a prompt need not wait until one has said so.

    tokens of the cache   | in use, by the last report | asked for since | the prompt at hand | spare share |

An estimate may be wrong, and the worker decides: see `RequestPlacer`. It is worth a message more only where
the worker's answers take long, as those between captured passes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epd.serve_app.messages import WorkerLoad

_SPARE_SHARE = 0.2  # of the cache: into which answers grow
_SLOW_S = 0.005  # until a worker answers: a prompt that need not wait for it is worth a message more
_LAST_SHARE = 0.3  # of the last answer, in the mean of the seconds that a worker takes


@dataclass(slots=True)
class Asked:
    """Room that a worker was asked for.

    start_s: when, on the caller's clock
    answered_by: the worker's last report when it had answered; None before
    """

    num_tokens: int
    num_seqs: int
    start_s: float
    answered_by: WorkerLoad | None = None


class DecodeCapacity:
    """Counts what decode workers were asked for and have not reported, and how long they take to answer."""

    def __init__(self, loads: Mapping[str, WorkerLoad], clock: Callable[[], float]) -> None:
        """Starts empty. loads: the last report of each worker. clock: seconds."""
        self._loads = loads
        self._clock = clock
        self._seconds: dict[str, float] = {}  # until an answer, a moving mean
        self._asked: dict[str, list[Asked]] = {}
        self._refused_by: dict[str, WorkerLoad] = {}

    def is_slow(self, worker: str) -> bool:
        """Returns whether a worker has taken long to answer lately."""
        return self._seconds.get(worker, 0.0) > _SLOW_S

    def has_room(self, worker: str, num_tokens: int, num_seqs: int) -> bool:
        """Returns whether a worker seems to have room for a prompt and as many answers to it."""
        load = self._loads.get(worker)
        if load is None or load.memory is None or load.kv_usage is None or load.seq_usage is None:
            return False
        if self._refused_by.get(worker) is load:
            return False
        asked = self._unreported(worker, load)
        capacity = load.memory.num_kv_tokens
        used_tokens = load.kv_usage * capacity + sum(each.num_tokens for each in asked)
        used_seqs = load.seq_usage * load.max_num_seqs + sum(each.num_seqs for each in asked)
        has_tokens = used_tokens + num_tokens <= (1 - _SPARE_SHARE) * capacity
        return has_tokens and used_seqs + num_seqs <= load.max_num_seqs

    def ask(self, worker: str, num_tokens: int, num_seqs: int) -> Asked:
        """Notes that a worker is asked for room."""
        asked, load = Asked(num_tokens, num_seqs, self._clock()), self._loads.get(worker)
        open_ = self._asked.setdefault(worker, []) if load is None else self._unreported(worker, load)
        open_.append(asked)
        return asked

    def answer(self, worker: str, asked: Asked, *, is_taken: bool) -> None:
        """Notes the answer: room that was given counts until the next report, which will count it."""
        load, seconds = self._loads.get(worker), self._clock() - asked.start_s
        mean_s = self._seconds.get(worker, seconds)
        self._seconds[worker] = mean_s + _LAST_SHARE * (seconds - mean_s)
        if is_taken and load is not None:
            asked.answered_by = load
            return
        self._asked[worker].remove(asked)
        if load is not None:
            self._refused_by[worker] = load

    def _unreported(self, worker: str, load: WorkerLoad) -> list[Asked]:
        asked = self._asked.get(worker, [])
        self._asked[worker] = [each for each in asked if each.answered_by is None or each.answered_by is load]
        return self._asked[worker]
