"""Ends `epd serve` when its Ray cluster is lost for good, and leaves neither processes nor files behind.

`ClusterWatch` decides, from observations that are passed in. Without it, an application whose raylet is lost
hangs and never ends, and one whose GCS is lost ends, in disorder, after a minute. Serve's controller is
restarted by Ray, which takes seconds.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from epd.errors import UnavailableError
from epd.machine import Looks, excused
from epd.serve_app.ray.process_tree import adopt_orphans, children, end_with_error

_RAYLET, _GCS, _CONTROLLER = "Ray's raylet", "Ray's GCS", "the controller of Ray Serve"
# In an owned cluster, children of this process, which are never restarted.
_PROCESSES = {"raylet": _RAYLET, "gcs_server": _GCS}
# Ray restarts a controller; in a cluster run by others, the GCS may be restarted too, and the raylet may
# reconnect.
_MAX_SILENCE_S = {_RAYLET: 30.0, _GCS: 30.0, _CONTROLLER: 60.0}
_LOOK_EVERY_S, _ASK_EVERY_S, _ANSWER_S = 0.2, 1.0, 5.0
_LOOK_AT_APP_S, _NUM_LOST = 3.0, 2
_NUM_DEAD_ANSWERS = 3  # a call in flight when the controller died gets the same answer


class ClusterWatch:
    """Keeps the last heartbeat of each part of a cluster.

    max_silence_s: how long each part, by name, may send no heartbeat, since it may be restarting. A part
    that was never seen alive has not started yet. every_s: between two looks. One that is late was made by a
    process that was stopped, and could hear of nobody: that time does not count.
    """

    def __init__(self, max_silence_s: Mapping[str, float], every_s: float) -> None:
        self._max_silence_s = dict(max_silence_s)
        self._looks = Looks(every_s, math.inf)
        self._alive_s: dict[str, float] = {}
        self._ended: set[str] = set()

    def alive(self, part: str, now_s: float) -> None:
        """Records that the part is alive."""
        self._alive_s[part] = now_s
        self._ended.discard(part)

    def ended(self, part: str) -> None:
        """Records that nothing will restart the part. It counts for one that was seen alive."""
        self._ended.add(part)

    def lost(self, now_s: float) -> str:
        """Returns why the cluster is gone for good, "" while it is not. To be called every `every_s`."""
        late_s = self._looks.late_s(now_s)
        for part, heard_s in list(self._alive_s.items()):
            alive_s = self._alive_s[part] = excused(heard_s, late_s, now_s)
            if part in self._ended:
                return f"{part} has ended"
            silence_s = now_s - alive_s
            if silence_s > self._max_silence_s[part]:
                return f"{part} has sent no heartbeat for {silence_s:.0f} s"
        return ""


@contextmanager
def supervised(*, owns_cluster: bool, end: Callable[[str], None] | None = None) -> Iterator[None]:
    """Calls `end` with the reason if the connected Ray cluster is lost while this is open.

    By default `end` ends this process and all that it has started. owns_cluster: whether it started Ray.
    """
    supervisor = _Supervisor(owns_cluster, end or end_at_once)
    supervisor.start()
    try:
        yield
    finally:
        supervisor.stop()


def end_at_once(reason: str) -> None:
    """Ends this process with exit code 3, and every process below it, as none can be closed gracefully."""
    end_with_error(UnavailableError(f"{reason}: the server cannot go on; start it again"))


@contextmanager
def ends_once(
    is_lost: Callable[[], bool],
    reason: str,
    *,
    every_s: float = _LOOK_AT_APP_S,
    end: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Calls `end` with the reason once `is_lost` has said so twice in a row while this is open.

    By default `end` ends this process and all that it has started. every_s: between two looks
    """
    stopped = threading.Event()

    def look() -> None:
        num_lost = 0
        while num_lost < _NUM_LOST and not stopped.wait(every_s):
            num_lost = num_lost + 1 if is_lost() else 0
        if not stopped.is_set():
            (end or end_at_once)(reason)

    threading.Thread(target=look, daemon=True, name="looks-at-application").start()
    try:
        yield
    finally:
        stopped.set()


class _Supervisor:
    """Checks and decides in one thread; queries in another, as a lost cluster may never answer."""

    def __init__(self, owns_cluster: bool, end: Callable[[str], None]) -> None:
        self._owns_cluster = owns_cluster
        self._end = end
        self._watch = ClusterWatch(_MAX_SILENCE_S, _LOOK_EVERY_S)
        self._stopped = threading.Event()
        self._controller: Any = None
        self._num_dead_answers = 0
        self._looking = threading.Thread(target=self._look, daemon=True, name="supervisor")
        self._asking = threading.Thread(target=self._ask, daemon=True, name="supervisor-asks")

    def start(self) -> None:
        self._looking.start()
        self._asking.start()

    def stop(self) -> None:
        """Stops; when it returns, `end` will no longer be called."""
        self._stopped.set()
        self._looking.join()

    def _look(self) -> None:
        processes = self._own_processes()
        while not self._stopped.wait(_LOOK_EVERY_S):
            for part, descriptor in processes.items():
                if select.select([descriptor], [], [], 0)[0]:
                    self._watch.ended(part)
                else:
                    self._watch.alive(part, time.monotonic())
            reason = self._watch.lost(time.monotonic())
            if reason:
                self._end(reason)
                return
        for descriptor in processes.values():
            os.close(descriptor)

    def _own_processes(self) -> dict[str, int]:
        """Returns descriptors, by part, that become readable when the process has ended."""
        if not self._owns_cluster:
            return {}
        adopt_orphans()
        below = children(os.getpid()).items()
        return {_PROCESSES[name]: os.pidfd_open(pid) for pid, name in below if name in _PROCESSES}

    def _ask(self) -> None:
        while not self._stopped.wait(_ASK_EVERY_S):
            self._ask_controller()
            if not self._owns_cluster:
                self._ask_gcs()

    def _ask_controller(self) -> None:
        try:
            if self._controller is None:  # names as in Ray's documents and logs
                self._controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
            ray.get(self._controller.__ray_ready__.remote(), timeout=_ANSWER_S)
        except ActorDiedError:
            self._num_dead_answers += 1
            if self._num_dead_answers >= _NUM_DEAD_ANSWERS:
                self._watch.ended(_CONTROLLER)
        except (RayError, ValueError):  # it is being started or restarted
            self._num_dead_answers = 0
        else:
            self._num_dead_answers = 0
            self._watch.alive(_CONTROLLER, time.monotonic())

    def _ask_gcs(self) -> None:
        """Queries the GCS, also for the state of this machine's raylet."""
        try:
            here = ray.get_runtime_context().get_node_id()
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
            is_alive = {node["NodeID"]: node["Alive"] for node in nodes}.get(here, False)
        except (RayError, RuntimeError):
            return
        self._watch.alive(_GCS, time.monotonic())
        if is_alive:
            self._watch.alive(_RAYLET, time.monotonic())
        else:
            self._watch.ended(_RAYLET)
