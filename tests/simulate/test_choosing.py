"""The simulator's quick choices are those of the live router."""

from __future__ import annotations

import numpy as np
import pytest

from epd.control.routing import Router
from epd.simulate.choosing import Chooser


@pytest.mark.parametrize("seed", range(3))
def test_every_choice_is_the_routers(seed: int) -> None:
    """Random bookings, of which later ones undo earlier ones; candidates change now and then."""
    rng = np.random.default_rng(seed)
    router = Router()
    quick, plain = Chooser(router, is_plain=False), Chooser(router, is_plain=True)
    everyone = [f"w{number}" for number in range(12)]
    candidates, undo = everyone, []
    for step in range(600):
        if step % 50 == 0:
            candidates = [name for name in everyone if rng.random() < 0.7] or everyone
        media = [(f"m{rng.integers(8)}", 64)]
        chosen = plain.prefill(candidates, media, 100)
        assert quick.prefill(candidates, media, 100) == chosen
        assert list(quick.decode_order(candidates)) == list(plain.decode_order(candidates))
        assert quick.encoder(candidates) == plain.encoder(candidates)
        if rng.random() < 0.3:
            router.remember_prefix(chosen, media)
        tokens, patches = int(rng.integers(1, 200)), int(rng.integers(1, 50))
        work = {"prefill_tokens": tokens, "num_prefills": 1, "num_decodes": 1, "encode_patches": patches}
        quick.book(chosen, **work)
        undo.append((chosen, {name: -value for name, value in work.items()}))
        while len(undo) > 20 or (undo and rng.random() < 0.4):
            worker, less = undo.pop(int(rng.integers(len(undo))))
            quick.book(worker, **less)


def test_what_is_stale_does_not_pile_up() -> None:
    chooser = Chooser(Router(), is_plain=False)
    names = ["a", "b", "c"]
    for _ in range(1000):
        worker = chooser.encoder(names)
        chooser.book(worker, encode_patches=7)
        chooser.book(worker, encode_patches=-7)
    assert len(chooser._encode._heap) <= 8 * len(names) + 1
