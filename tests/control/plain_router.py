"""The slow twin of the router: sorts all candidates for every choice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from epd.control.routing import Router


class PlainRouter(Router):
    def prefill_order(
        self, candidates: Collection[str], media: Sequence[tuple[str, int]] = ()
    ) -> Iterator[str]:
        cached = self.contents.cached(media)

        def cost(worker: str) -> tuple[int, int, str]:
            counts = self.in_flight(worker)
            num_requests = counts.num_prefills + counts.num_decodes
            return counts.prefill_tokens - cached.get(worker, 0), num_requests, worker

        return iter(sorted(candidates, key=cost))

    def decode_order(self, candidates: Collection[str]) -> Iterator[str]:
        return iter(sorted(candidates, key=lambda name: (self.in_flight(name).num_decodes, name)))

    def encoder(self, candidates: Collection[str], wanted: str | None = None) -> str:
        if wanted in candidates:
            return wanted
        return min(candidates, key=lambda name: (self.in_flight(name).encode_patches, name))

    def video(self, candidates: Collection[str]) -> str:
        return min(candidates, key=lambda name: (self.in_flight(name).num_videos, name))
