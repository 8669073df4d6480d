"""The KV cache policy under any sequence of openings, chunks, drafts, forks, cuts, prunings and ends.

The machine carries out what the manager decides on a simulated memory: every slot holds the identity row of
the token that was written there, or the garbage of a rejected draft. Whatever a table or a cached node says
that it holds must be there, in the slots it names. A recurrent state is simulated as the rows of all tokens
that led to it. Of a layer group with a window, what is behind it is nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epd.kv.block_pool import FREED, BlockCopy
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.prefix_cache import ROW_BYTES, TokenIdentity, token_identity
from epd.types import PlaceholderRange

BLOCK_SIZE = 3
TIGHT, ROOMY = (5, 7), (400, 400)
# No recurrent states, the fewest that a sequence can do with, a few, and enough for all snapshots.
NUM_STATES = st.sampled_from([0, 0, 0, 2, 5, 400])
# Of the second layer group, in tokens; and how many are written at once there.
WINDOWS = st.sampled_from([None, None, None, 1, 3, 5])
NUM_AHEAD = 4
# Few tokens and few media, so that requests often begin alike.
QUESTIONS = st.builds(
    lambda tokens, length: tokens[:length],
    st.sampled_from([(0, 1, 0, 1, 1, 0, 1, 1, 0), (0, 1, 0, 0, 0, 1, 1, 0, 1), (1, 1, 0, 1, 0, 0, 1, 0, 1)]),
    st.sampled_from([0, 1, 3, 4, 5, 8, 9]),
)
MEDIA = st.sampled_from([(), (b"A",), (b"B",), (b"A", b"B")])
UNIT_LENGTH = 4
MAX_CACHED = st.sampled_from([0, 4, 20, 20, 20])
IS_SHAREABLE = IS_CACHING = st.sampled_from([True] * 5 + [False])

Row = bytes


@dataclass
class Model:
    """What a request must find in its blocks.

    rows: what was written, of each layer group. is_private: whether nobody else may hold any of its blocks.
    """

    identity: TokenIdentity
    is_shareable: bool
    rows: list[list[Row]] = field(default_factory=lambda: [[], []])
    is_private: bool = False


def prompt(media: Sequence[bytes], question: Sequence[int]) -> TokenIdentity:
    units = [
        (PlaceholderRange(1 + UNIT_LENGTH * place, UNIT_LENGTH), name * 16)
        for place, name in enumerate(media)
    ]
    return token_identity([5] + [9] * UNIT_LENGTH * len(media) + list(question), units)


def rows_of(identity: TokenIdentity, stop: int) -> list[Row]:
    return [identity.row_bytes(at, at + 1) for at in range(stop)]


def num_common(a: Sequence[Row], b: Sequence[Row]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([TIGHT, TIGHT, ROOMY]),
        enable=IS_CACHING,
        num_states=NUM_STATES,
        window=WINDOWS,
        clients=st.sampled_from(["", "aabaaa"]),
    )
    def start(
        self, num_blocks: tuple[int, ...], enable: bool, num_states: int, window: int | None, clients: str
    ) -> None:
        spec = KVCacheSpec(num_blocks, BLOCK_SIZE, num_states, (None, window), NUM_AHEAD)
        self.window = window
        self.clients = clients or [""]  # of requests, in turns
        self.keeps_all = not num_states and window is None
        self.manager = KVCacheManager(spec, enable_prefix_caching=enable)
        self.states: list[list[Row]] = [[] for _ in range(num_states)]
        self.memory: list[list[list[Row]]] = [[[b""] * BLOCK_SIZE for _ in range(num)] for num in num_blocks]
        self.copies: deque[BlockCopy] = deque()
        self.requests: dict[str, Model] = {}
        self.findable: list[list[Row]] = []  # what was committed or freed, while nothing has been evicted
        self.num_opened = 0
        self.num_drafts = 0

    # The simulated memory

    def carry_out_copies(self) -> None:
        while self.copies:
            copy = self.copies.popleft()
            blocks = self.memory[copy.layer_group]
            assert 0 < copy.num_tokens < BLOCK_SIZE
            blocks[copy.target][: copy.num_tokens] = blocks[copy.source][: copy.num_tokens]
            self.manager.copied([copy])

    def write(self, request_id: str, group: int, start: int, rows: Sequence[Row]) -> None:
        blocks = self.manager.block_table(request_id, group)
        for at, row in enumerate(rows, start=start):
            assert blocks[at // BLOCK_SIZE] != FREED
            self.memory[group][blocks[at // BLOCK_SIZE]][at % BLOCK_SIZE] = row

    def read(self, request_id: str, group: int) -> list[Row]:
        slots: list[Row] = []
        for block in self.manager.block_table(request_id, group):
            slots += [b""] * BLOCK_SIZE if block == FREED else self.memory[group][block]
        return slots[: self.manager.num_tokens(request_id, group)]

    def attended(self, rows: Sequence[Row], group: int) -> list[Row]:
        """What the next token attends, and what lies with it in a block; nothing in the place of the rest."""
        first = self.manager.spec.first_attended(group, len(rows)) // BLOCK_SIZE * BLOCK_SIZE
        return [b""] * first + list(rows[first:])

    # What is to be compared before and after

    def state(self) -> object:
        manager = self.manager
        return (
            [list(pool._references) for pool in manager._room.pools],
            [(id(node), node.num_pins) for node in manager._cache.nodes()],
            [id(node) for node in manager._cache._idle],
            {name: [list(table.blocks) for table in held.tables] for name, held in manager._requests.items()},
            {name: held.lengths for name, held in manager._requests.items()},
            {name: self.slots(name) for name in manager._requests},
            [(id(node), slot) for node, slot in manager._cache.snapshots.items()],
        )

    def slots(self, request_id: str) -> tuple[int | None, int | None]:
        return self.manager.current_state(request_id), self.manager.next_state(request_id)

    def must_refuse(self, change: Callable[[], object]) -> None:
        before = self.state()
        with pytest.raises(ValueError, match="are free"):
            change()
        assert self.state() == before

    # Rules

    def new_request(self, model: Model) -> str:
        self.num_opened += 1
        self.requests[f"r{self.num_opened}"] = model
        return f"r{self.num_opened}"

    @rule(media=MEDIA, question=QUESTIONS, max_cached=MAX_CACHED, is_shareable=IS_SHAREABLE)
    def open(
        self, media: Sequence[bytes], question: Sequence[int], max_cached: int, is_shareable: bool
    ) -> None:
        self.open_prompt(prompt(media, question), max_cached, is_shareable)

    def open_prompt(self, identity: TokenIdentity, max_cached: int, is_shareable: bool) -> str:
        cached = self.num_cached(identity, max_cached)
        identity.client = self.clients[self.num_opened % len(self.clients)]
        request_id = self.new_request(Model(identity, is_shareable, is_private=not is_shareable))
        copies = self.manager.open(request_id, identity, max_cached=max_cached, is_shareable=is_shareable)
        found = self.manager.num_tokens(request_id)
        if not is_shareable:
            assert found == 0
        elif not self.keeps_all:
            assert (found, copies) == (cached, [])
        else:
            assert found in (cached, cached // BLOCK_SIZE * BLOCK_SIZE)
            assert (found % BLOCK_SIZE > 0) == bool(copies)
        self.copies.extend(copies)
        self.requests[request_id].rows = [rows_of(identity, found), rows_of(identity, found)]
        return request_id

    @rule(media=MEDIA, question=QUESTIONS, is_freed=st.booleans())
    def serve(self, media: Sequence[bytes], question: Sequence[int], is_freed: bool) -> None:
        """A request from its first token to its last, if there is room."""
        identity = prompt(media, question)
        request_id = self.open_prompt(identity, len(identity) - 1, is_shareable=True)
        self.allocate_for(request_id, len(identity))
        self.run_for(request_id, len(identity))
        if is_freed:
            self.free_one(request_id)

    @rule(media=MEDIA, question=QUESTIONS, max_tokens=st.none() | st.integers(0, 20))
    def ask_what_is_cached(
        self, media: Sequence[bytes], question: Sequence[int], max_tokens: int | None
    ) -> None:
        self.num_cached(prompt(media, question), max_tokens)

    def num_cached(self, identity: TokenIdentity, max_tokens: int | None) -> int:
        """Whatever begins alike is found, to the token, unless it had to make room."""
        before = self.state()
        cached = self.manager.num_cached(identity, max_tokens)
        assert self.state() == before
        wanted = rows_of(identity, len(identity))[:max_tokens]
        longest = max((self.num_findable(rows, wanted) for rows in self.findable), default=0)
        if self.manager.num_evictions or 0 < len(self.states) < 400 or self.window is not None:
            assert cached <= longest
        else:
            assert cached == longest
        return cached

    def num_findable(self, rows: Sequence[Row], wanted: Sequence[Row]) -> int:
        """A state is that of all its tokens, or of no use."""
        num = num_common(rows, wanted)
        return num if self.keeps_all or num == len(rows) else 0

    def some(self, data: st.DataObject) -> tuple[str, Model]:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        return request_id, self.requests[request_id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), num_before=st.integers(0, 6))
    def restore(self, data: st.DataObject, num_tokens: int, num_before: int) -> None:
        """What another life has kept of a prompt comes back behind what is cached."""
        identity = self.some(data)[1].identity
        self.carry_out_copies()
        start = num_before * BLOCK_SIZE
        stop = min(start + num_tokens, len(identity))
        if stop <= start or not self.manager.enable_prefix_caching:
            return
        before, is_cached = self.state(), self.manager.num_cached(identity, start) == start
        blocks = self.manager.restore(identity, start, stop)
        if blocks is None:
            assert self.state() == before
            lacks = min(self.manager.num_free_blocks(group) for group in (0, 1)) < -(
                -num_tokens // BLOCK_SIZE
            )
            assert not is_cached or lacks or num_before or self.manager.spec.keeps_states
            return
        assert is_cached
        for at, row in enumerate(rows_of(identity, stop)[start:]):
            for group in (0, 1):
                self.memory[group][blocks[at // BLOCK_SIZE][group]][at % BLOCK_SIZE] = row
        assert self.manager.num_cached(identity, stop) == stop
        self.findable.append(rows_of(identity, stop))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), added=st.integers(0, 8))
    def allocate(self, data: st.DataObject, added: int) -> None:
        request_id, _ = self.some(data)
        self.allocate_for(request_id, self.manager.num_tokens(request_id) + added)

    def allocate_for(self, request_id: str, num_tokens: int) -> None:
        state, order = self.state(), list(self.manager._cache._idle)
        is_possible = self.manager.can_allocate(request_id, num_tokens)
        assert self.state() == state
        if not is_possible:
            self.must_refuse(lambda: self.manager.allocate(request_id, num_tokens))
            return
        added = num_tokens - self.manager.num_tokens(request_id)
        num_free = [pool.num_free for pool in self.manager._room.pools]
        held = [len(self.manager.block_table(request_id, group)) for group in (0, 1)]
        self.manager.allocate(request_id, num_tokens)
        if self.window is not None:
            assert self.room(request_id, 0) >= added
            assert self.room(request_id, 1) >= min(added, NUM_AHEAD)
            return
        taken = [len(self.manager.block_table(request_id, group)) - held[group] for group in (0, 1)]
        num_evicted = max(0, *(taken[group] - num_free[group] for group in (0, 1)))
        left = list(self.manager._cache._idle)
        if len(self.clients) == 1:
            assert left == order[num_evicted:]
        assert left == [node for node in order if node in self.manager._cache._idle]
        assert len(left) == len(order) - num_evicted
        for group in (0, 1):
            assert self.room(request_id, group) >= added
            assert taken[group] == 0 or self.room(request_id, group) < added + BLOCK_SIZE

    def room(self, request_id: str, group: int) -> int:
        num_slots = len(self.manager.block_table(request_id, group)) * BLOCK_SIZE
        return num_slots - self.manager.num_tokens(request_id, group)

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        num_tokens=st.integers(0, 8),
        generated=st.lists(st.integers(0, 1), max_size=2),
        keeps_state=st.booleans(),
    )
    def run(self, data: st.DataObject, num_tokens: int, generated: Sequence[int], keeps_state: bool) -> None:
        request_id, model = self.some(data)
        for token_id in generated:
            model.identity.append(token_id)
        self.allocate_for(request_id, self.manager.num_tokens(request_id) + num_tokens)
        self.run_for(request_id, num_tokens, keeps_state)

    def run_for(self, request_id: str, num_tokens: int, keeps_state: bool = True) -> None:
        """One forward pass over all the room there is, of which the first tokens turn out to be right."""
        model = self.requests[request_id]
        self.carry_out_copies()
        done = self.manager.num_tokens(request_id)
        rooms = [self.room(request_id, group) for group in (0, 1)]
        following = self.manager.next_state(request_id)
        if self.states and following is None:
            num_tokens = 0
        stop = done + max(0, min(num_tokens, *rooms, len(model.identity) - done))
        new = rows_of(model.identity, stop)[done:]
        self.num_drafts += 1
        for group in (0, 1):
            length = self.manager.num_tokens(request_id, group)
            assert length == len(model.rows[group])
            self.write(request_id, group, length, [b"draft %d" % self.num_drafts] * rooms[group])
            self.write(request_id, group, length, new)
            model.rows[group] += new
        if following is not None:
            self.states[following] = list(model.rows[0])
        self.manager.commit(request_id, model.identity, stop, keeps_state=keeps_state)
        if self.is_cached(model) and self.is_findable(stop, keeps_state):
            self.findable.append(model.rows[0][: stop // BLOCK_SIZE * BLOCK_SIZE])

    def is_findable(self, num_tokens: int, keeps_state: bool) -> bool:
        return self.keeps_all or (keeps_state and num_tokens % BLOCK_SIZE == 0)

    def is_cached(self, model: Model) -> bool:
        return model.is_shareable and self.manager.enable_prefix_caching

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request_id, model = self.some(data)
        before = self.state()
        is_possible = self.manager.can_fork(request_id)
        assert self.state() == before
        if not is_possible:
            self.must_refuse(lambda: self.manager.fork(request_id, "never"))
            return
        model.is_private = False
        rows = [list(rows) for rows in model.rows]
        child_id = self.new_request(Model(model.identity.copy(), model.is_shareable, rows))
        self.copies.extend(self.manager.fork(request_id, child_id))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork_and_give_up(self, data: st.DataObject) -> None:
        """A child for which there is no room in the end: its copies are never carried out."""
        request_id, model = self.some(data)
        model.identity.append(100 + self.num_drafts)  # like no other: nobody has filed it before
        self.allocate_for(request_id, len(model.identity))
        self.run_for(request_id, len(model.identity) - self.manager.num_tokens(request_id))
        if self.manager.can_fork(request_id):
            self.manager.fork(request_id, "given up")
            self.manager.free("given up")

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), added=st.integers(-6, 3), group=st.none() | st.none() | st.integers(0, 1))
    def truncate(self, data: st.DataObject, added: int, group: int | None) -> None:
        request_id, model = self.some(data)
        num_tokens = max(0, self.manager.num_tokens(request_id, group or 0) + added)
        lengths = [len(rows) for rows in model.rows]
        cut = lengths[0] - num_tokens
        before = self.state()
        if (group is None and min(lengths) < cut) or (not self.keeps_all and num_tokens < lengths[0]):
            with pytest.raises(ValueError, match="cannot be cut"):
                self.manager.truncate(request_id, num_tokens, group)
            assert self.state() == before
            return
        try:
            copies = self.manager.truncate(request_id, num_tokens, group)
        except ValueError:
            assert self.state() == before
            assert 0 in [self.manager.num_free_blocks(group) for group in (0, 1)]
            return
        self.copies.extend(copies)
        for index in range(2) if group is None else [group]:
            del model.rows[index][max(0, lengths[index] - cut if group is None else num_tokens) :]
        model.is_shareable &= len(model.rows[0]) == len(model.rows[1])

    @precondition(lambda self: self.keeps_all and any(one.is_private for one in self.requests.values()))
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        """Every other token of one layer group goes; the rest moves together, in the same blocks."""
        names = [name for name, one in self.requests.items() if one.is_private]
        request_id, group = data.draw(st.sampled_from(names)), data.draw(st.integers(0, 1))
        model = self.requests[request_id]
        self.carry_out_copies()
        model.rows[group] = model.rows[group][::2]
        self.write(request_id, group, 0, model.rows[group])
        copies = self.manager.truncate(request_id, len(model.rows[group]), group)
        self.copies.extend(copies)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), added=st.integers(0, 3))
    def keep_some_behind(self, data: st.DataObject, added: int) -> None:
        """Some tokens are copied behind all, in one layer group more than in the other; the rest goes."""
        request_id, model = self.some(data)
        kept = [rows[::step] for rows, step in zip(model.rows, (2, 3), strict=True)]
        written = -(-max(len(rows) for rows in model.rows) // BLOCK_SIZE) * BLOCK_SIZE
        self.allocate_for(request_id, written + max(len(rows) for rows in kept) + added)
        self.carry_out_copies()
        starts = [-(-len(rows) // BLOCK_SIZE) * BLOCK_SIZE for rows in model.rows]
        rooms = [len(self.manager.block_table(request_id, group)) * BLOCK_SIZE for group in (0, 1)]
        lengths = [len(rows) for rows in kept]
        lacks = any(start + num > room for start, num, room in zip(starts, lengths, rooms, strict=True))
        if lacks or not self.keeps_all:
            before = self.state()
            with pytest.raises(ValueError, match="room behind"):
                self.manager.keep_behind(request_id, lengths)
            assert self.state() == before
            return
        for group in (0, 1):
            self.write(request_id, group, starts[group], kept[group])
        self.manager.keep_behind(request_id, lengths)
        model.rows, model.is_shareable, model.is_private = kept, False, True
        for group in (0, 1):
            num_blocks = len(self.manager.block_table(request_id, group))
            assert num_blocks == (rooms[group] - starts[group]) // BLOCK_SIZE

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_one(self.some(data)[0])

    def free_one(self, request_id: str) -> None:
        model = self.requests.pop(request_id)
        is_written = self.manager.is_written(request_id)
        self.manager.free(request_id)
        if self.is_cached(model) and self.keeps_all:
            whole = len(model.rows[0]) // BLOCK_SIZE * BLOCK_SIZE
            self.findable.append(model.rows[0] if is_written else model.rows[0][:whole])

    @precondition(lambda self: self.manager.spec.num_blocks == TIGHT)
    @rule()
    def clear_idle(self) -> None:
        self.manager.clear_idle()
        assert not self.manager._cache.num_idle

    # What holds at every step

    @invariant()
    def nothing_is_broken(self) -> None:
        self.manager.check_integrity()
        for group, num_blocks in enumerate(self.manager.spec.num_blocks):
            held = {block for name in self.requests for block in self.manager.block_table(name, group)}
            held -= {FREED}
            assert 0 <= self.manager.num_free_blocks(group) <= num_blocks - len(held)
        assert 0 <= self.manager.usage <= 1

    @precondition(lambda self: not self.copies)
    @invariant()
    def everything_is_where_it_is_said_to_be(self) -> None:
        for request_id, model in self.requests.items():
            for group in (0, 1):
                assert self.read(request_id, group) == self.attended(model.rows[group], group)
            current, following = self.slots(request_id)
            assert current is None or (self.states[current] == model.rows[0] and current != following)
        for node in self.manager._cache.nodes():
            rows = [node.key[at : at + ROW_BYTES] for at in range(0, len(node.key), ROW_BYTES)]
            for group, block in enumerate(node.blocks):
                assert self.memory[group][block][: len(rows)] == rows
            kept, above = self.manager._cache.snapshots.get(node), node.parent
            while kept is not None and above is not None:
                split = [above.key[at : at + ROW_BYTES] for at in range(0, len(above.key), ROW_BYTES)]
                rows, above = split + rows, above.parent
            if kept is not None and self.states:
                assert self.states[kept[0][0]] == rows
            if kept is not None and self.window is not None:
                last = [row for block in kept[-1] for row in self.memory[1][block]]
                first = self.manager.spec.first_attended(1, len(rows)) // BLOCK_SIZE * BLOCK_SIZE
                assert last == rows[first:]

    @rule()
    def carry_out(self) -> None:
        self.carry_out_copies()

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request_id in list(self.requests):
            self.manager.free(request_id)
        self.manager.check_integrity()
        for group, num_blocks in enumerate(self.manager.spec.num_blocks):
            assert self.manager.num_free_blocks(group) == num_blocks
        self.manager.clear_idle()
        assert [pool.num_free for pool in self.manager._room.pools] == list(self.manager.spec.num_blocks)
        assert not self.states or self.manager._room.states.num_free == len(self.states)


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
