"""Estimates whether decode workers have room, so that a prompt need not wait until one has said so.

    tokens of the cache   | in use, by the last report | asked for since | the prompt at hand | spare share |

An estimate may be wrong, and the worker decides: see `RequestPlacer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.messages import WorkerLoad

_SPARE_SHARE = 0.2  # of the cache: into which answers grow


@dataclass(slots=True)
class Asked:
    """Room that a worker was asked for. answered_by: its last report when it had answered; None before."""

    num_tokens: int
    num_seqs: int
    answered_by: WorkerLoad | None = None


class RoomBooks:
    """Keeps what decode workers were asked for and have not reported. loads: the last report of each."""

    def __init__(self, loads: Mapping[str, WorkerLoad]) -> None:
        self._loads = loads
        self._asked: dict[str, list[Asked]] = {}
        self._refused_by: dict[str, WorkerLoad] = {}

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
        asked = Asked(num_tokens, num_seqs)
        self._asked.setdefault(worker, []).append(asked)
        return asked

    def answer(self, worker: str, asked: Asked, *, is_taken: bool) -> None:
        """Notes the answer: room that was given counts until the next report, which will count it."""
        load = self._loads.get(worker)
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
