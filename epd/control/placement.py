"""Decides where a request goes. Pure policy: it yields questions that the server or simulator asks workers.

    for each prefill worker, the best first
        it decodes too      ->  submit
        others decode       ->  reserve at decode workers, the best first, until one has room  ->  submit
                                    refused  ->  release the room

`PlacementPolicy.place` is a generator of such steps, into which the driver sends the worker's answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Literal, Protocol

from epd.control.routing import Router
from epd.errors import UnavailableError
from epd.topology import Stage

# Maximum open questions to one worker, so that one that does not answer delays no other requests.
_MAX_ASKING = 2
Allowed = Callable[[Stage, Sequence[str]], Sequence[str]]


class TakesWork(Protocol):
    """Describes a worker, as the server and the simulator know it."""

    @property
    def name(self) -> str: ...

    @property
    def roles(self) -> frozenset[Stage]: ...

    def takes(self, stage: Stage) -> bool:
        """Returns whether the worker takes new work of a stage."""
        ...


class Candidates:
    """Lists the workers that take new work, by stage: a snapshot."""

    def __init__(self, workers: Iterable[TakesWork]) -> None:
        self._workers = tuple(workers)
        self._taking: dict[Stage, tuple[str, ...]] = {}
        self._others: tuple[str, ...] | None = None

    def taking(self, stage: Stage) -> tuple[str, ...]:
        """Returns the workers that take new work of a stage; the same tuple each time."""
        if stage not in self._taking:
            self._taking[stage] = tuple(each.name for each in self._workers if each.takes(stage))
        return self._taking[stage]

    def prefillers(self) -> tuple[str, ...]:
        """Returns the workers that take prompts which are decoded somewhere: by themselves, or by others."""
        taking = self.taking("prefill")
        return taking if self.decoders() else tuple(filter(self.is_merged, taking))

    def decoders(self) -> tuple[str, ...]:
        """Returns the workers that decode for others: those that prefill too decode only their own."""
        if self._others is None:
            self._others = tuple(
                each.name for each in self._workers if each.takes("decode") and "prefill" not in each.roles
            )
        return self._others

    def is_merged(self, prefill_worker: str) -> bool:
        """Returns whether a prefill worker also decodes its requests."""
        return prefill_worker in self.taking("decode")


class Placement:
    """Holds the workers of one request, and its share of the router's counts.

    prefill_worker, decode_worker: the same one where roles are merged; empty before they are chosen
    touched: all workers that may know of the request
    """

    def __init__(self, router: Router, num_tokens: int) -> None:
        """num_tokens counts those of the prompt."""
        self.prefill_worker = self.decode_worker = ""
        self.touched: set[str] = set()
        self._router = router
        self._num_tokens = num_tokens
        self._is_prefilling = self._is_decoding = self._is_closed = False

    @property
    def is_merged(self) -> bool:
        return self.prefill_worker == self.decode_worker

    def take(self, prefill_worker: str, decode_worker: str) -> None:
        """Chooses workers and gives back the previous ones."""
        self.release()
        self._take_prefill(prefill_worker)
        self.move_decode(decode_worker)

    def move_prefill(self, worker: str) -> None:
        """Moves the prefill of the prompt to another worker."""
        self.end_prefill()
        self._take_prefill(worker)

    def _take_prefill(self, worker: str) -> None:
        self.prefill_worker, self._is_prefilling = worker, not self._is_closed
        self.touched.add(worker)
        if self._is_prefilling:
            self._router.add(worker, num_prefills=1, prefill_tokens=self._num_tokens)

    def move_decode(self, worker: str) -> None:
        """Moves decode to another worker."""
        self._end_decode()
        self.decode_worker, self._is_decoding = worker, not self._is_closed
        self.touched.add(worker)
        if self._is_decoding:
            self._router.add(worker, num_decodes=1)

    def end_prefill(self) -> bool:
        """Records that the prompt is computed. Returns whether that is new."""
        if not self._is_prefilling:
            return False
        self._is_prefilling = False
        self._router.add(self.prefill_worker, num_prefills=-1, prefill_tokens=-self._num_tokens)
        return True

    def _end_decode(self) -> None:
        if self._is_decoding:
            self._is_decoding = False
            self._router.add(self.decode_worker, num_decodes=-1)

    def release(self) -> None:
        """Releases all counts: nothing of the request is left at any worker."""
        self.end_prefill()
        self._end_decode()

    def close(self) -> None:
        """Releases all counts for good: a move that ends later counts nothing."""
        self._is_closed = True
        self.release()


# A step names the next question to the workers of the placement:
#   reserve    room for the answer, at the decode worker
#   submit     the prompt, to the prefill worker; room is reserved at the decode worker unless they are one
#   release    what was reserved, at the decode worker; its answer does not matter
Step = Literal["reserve", "submit", "release"]
Steps = Generator[Step, bool, bool]


class PlacementPolicy:
    """Chooses the workers of requests.

    router: its counts decide the order
    candidates: the workers that take new work now
    max_prefills: requests whose prompt one worker computes at a time; None for any number
    asking: questions that a worker has not answered yet, counted by the driver
    """

    def __init__(
        self, router: Router, candidates: Callable[[], Candidates], *, max_prefills: int | None = None
    ) -> None:
        self.router = router
        self.asking: Counter[str] = Counter()
        self.candidates = candidates
        self._max_prefills = max_prefills

    def can_ask(self) -> bool:
        """Returns whether any worker can be asked to take a prompt; `place` asks nobody if none can."""
        return bool(self._prefillers(None))

    def place(
        self, placement: Placement, media: Sequence[tuple[str, int]], allowed: Allowed | None = None
    ) -> Steps:
        """Asks workers once. Yields steps and returns whether a worker has taken the prompt.

        If not, nothing is left where it was refused. A decode worker that has refused is not asked again for
        another prefill worker.
        media: (mm_hash, visual tokens) of each item. allowed: filters the workers the request may go to.
        """
        refused: set[str] = set()
        is_taken = False
        try:
            for worker in self.router.prefill_order(self._prefillers(allowed), media):
                if self.candidates().is_merged(worker):
                    placement.take(worker, worker)
                    is_taken = yield "submit"
                else:
                    is_taken = yield from self._place_split(placement, worker, refused, allowed)
                if is_taken:
                    self.router.contents.remember_prefix(worker, media)
                    return True
                placement.release()
            return False
        finally:
            if not is_taken:
                placement.release()

    def _place_split(
        self, placement: Placement, prefill_worker: str, refused: set[str], allowed: Allowed | None
    ) -> Steps:
        for worker in self.decoders(allowed):
            if worker in refused:
                continue
            placement.take(prefill_worker, worker)
            if not (yield "reserve"):
                refused.add(worker)
            elif (yield "submit"):
                return True
            else:
                yield "release"
                return False
        return False

    def _prefillers(self, allowed: Allowed | None) -> Sequence[str]:
        names: Sequence[str] = self._answering(self.candidates().prefillers())
        if self._max_prefills is not None:
            names = [name for name in names if self.router.load(name).num_prefills < self._max_prefills]
        return names if allowed is None else allowed("prefill", names)

    def decoders(self, allowed: Allowed | None = None) -> Iterable[str]:
        """Yields the workers that decode for other prefill workers, the best first."""
        names = self.router.decode_order(self._answering(self.candidates().decoders()))
        return names if allowed is None else allowed("decode", list(names))

    def _answering(self, names: Sequence[str]) -> Sequence[str]:
        """Returns the workers that have fewer than the maximum of open questions."""
        if not self.asking:
            return names
        return [name for name in names if self.asking[name] < _MAX_ASKING]

    def check_roles(self, complete_s: float, now_s: float, unavailable_s: float) -> float:
        """Returns when every role last had a worker. Raises UnavailableError if that is too long ago.

        complete_s: when it last was so, or when the request began to wait, if that is later
        """
        candidates = self.candidates()
        missing = [stage for stage in ("prefill", "decode") if not candidates.taking(stage)]
        if not missing:
            return now_s
        without_s = now_s - complete_s
        if without_s > unavailable_s:
            raise UnavailableError(
                f"no worker for {' and '.join(missing)} since {without_s:.0f} s; see /health and try again"
            )
        return complete_s
