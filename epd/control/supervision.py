"""Decides when the cluster under a server is gone for good. Policy only; observations are passed in."""

from __future__ import annotations

from collections.abc import Mapping


class ClusterWatch:
    """Keeps the last heartbeat of each part of a cluster.

    max_silence_s: how long each part, by name, may send no heartbeat, since it may be restarting. A part
    that was never seen alive has not started yet.
    """

    def __init__(self, max_silence_s: Mapping[str, float]) -> None:
        self._max_silence_s = dict(max_silence_s)
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
        """Returns why the cluster is gone for good, "" while it is not."""
        for part, alive_s in list(self._alive_s.items()):
            if part in self._ended:
                return f"{part} has ended"
            silence_s = now_s - alive_s
            if silence_s > self._max_silence_s[part]:
                return f"{part} has sent no heartbeat for {silence_s:.0f} s"
        return ""
