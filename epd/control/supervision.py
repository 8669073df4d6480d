"""When the cluster under a server is gone for good: policy only, what is seen of its parts comes in."""

from __future__ import annotations

from collections.abc import Mapping


class ClusterWatch:
    """What was last seen of each part of a cluster.

    max_silence_s: how long each part, by name, may give no sign of life, since it may be starting again. One
    that was never seen alive has not started yet.
    """

    def __init__(self, max_silence_s: Mapping[str, float]) -> None:
        self._max_silence_s = dict(max_silence_s)
        self._alive_s: dict[str, float] = {}
        self._ended: set[str] = set()

    def alive(self, part: str, now_s: float) -> None:
        """The part has shown that it lives."""
        self._alive_s[part] = now_s
        self._ended.discard(part)

    def ended(self, part: str) -> None:
        """Nothing will start the part again. It counts for one that was seen alive."""
        self._ended.add(part)

    def lost(self, now_s: float) -> str:
        """Why the cluster is gone for good, "" while it is not."""
        for part, alive_s in list(self._alive_s.items()):
            if part in self._ended:
                return f"{part} has ended"
            silence_s = now_s - alive_s
            if silence_s > self._max_silence_s[part]:
                return f"{part} has sent no heartbeat for {silence_s:.0f} s"
        return ""
