"""The router's heaps give the orders of its slow twin, which sorts."""

from __future__ import annotations

import numpy as np
import pytest

from epd.control.routing import Router
from tests.control.plain_router import PlainRouter


@pytest.mark.parametrize("seed", range(3))
def test_every_order_is_that_of_the_slow_twin(seed: int) -> None:
    """Random counts, of which later ones undo earlier ones; candidates change now and then."""
    rng = np.random.default_rng(seed)
    quick, plain = Router(), PlainRouter()
    everyone = tuple(f"w{number}" for number in range(12))
    candidates, undo = everyone, []
    for step in range(600):
        if step % 50 == 0:
            candidates = tuple(name for name in everyone if rng.random() < 0.7) or everyone
        media = [(f"m{rng.integers(8)}", 64)]
        order = list(plain.prefill_order(candidates, media))
        assert list(quick.prefill_order(candidates, media)) == order
        assert list(quick.decode_order(candidates)) == list(plain.decode_order(candidates))
        assert quick.encoder(candidates) == plain.encoder(candidates)
        assert quick.video(list(candidates)) == plain.video(candidates)
        chosen, is_remembered = order[0], rng.random() < 0.3
        tokens, patches = int(rng.integers(1, 200)), int(rng.integers(1, 50))
        work = {
            "prefill_tokens": tokens,
            "num_prefills": 1,
            "num_decodes": 1,
            "encode_patches": patches,
            "num_videos": 1,
        }
        undo.append((chosen, {name: -value for name, value in work.items()}))
        less = []
        while len(undo) > 20 or (undo and rng.random() < 0.4):
            less.append(undo.pop(int(rng.integers(len(undo)))))
        for router in (quick, plain):
            if is_remembered:
                router.contents.remember_prefix(chosen, media)
            for worker, counts in ((chosen, work), *less):
                router.add(worker, **counts)


def test_stale_entries_do_not_pile_up() -> None:
    router = Router()
    names = ("a", "b", "c")
    for _ in range(1000):
        worker = router.encoder(names)
        router.add(worker, encode_patches=7)
        router.add(worker, encode_patches=-7)
    assert len(router._encode._heap) <= 8 * len(names) + 1
