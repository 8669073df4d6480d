"""The scheduler's policy, told as stories: read them in order to learn what is computed next, and why.

A step is one forward pass. The model is a fake: it computes what it is given, and answers grow by one
token a pass. Blocks have 4 tokens. A span (name, start, stop): tokens of a request that one pass computes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from epd.errors import InfeasibleError
from epd.kv.block_pool import BlockCopy
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.prefix_cache import token_identity
from epd.kv.scheduled_request import PrunedRange, ScheduledRequest, SchedulerOutput
from epd.kv.scheduling import Scheduler


def scheduler(num_blocks: int = 64, **limits: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**limits), KVCacheManager(KVCacheSpec((num_blocks,), 4)))


def request(
    name: str,
    num_prompt: int,
    *,
    num_ready: int | None = None,
    max_new: int = 4,
    priority: int = 0,
    **more: Any,
) -> ScheduledRequest:
    """A prompt like no other, unless its name begins with the same letter. num_ready: all by default."""
    tokens = np.arange(num_prompt) + 100 * ord(name[0])
    return ScheduledRequest(
        name, token_identity(tokens.tolist()), num_prompt, num_prompt + max_new,
        num_prompt if num_ready is None else num_ready, priority=priority, **more,
    )  # fmt: skip


def add(queue: Scheduler, *requests: ScheduledRequest) -> None:
    for each in requests:
        queue.add(each)


def spans(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.stop) for chunk in output.chunks]


def names(requests: list[ScheduledRequest]) -> list[str]:
    return [each.request_id for each in requests]


def computed(queue: Scheduler, output: SchedulerOutput) -> None:
    """Does what the engine does in a pass: stores every chunk, and samples where all tokens are computed."""
    queue.kv.copied(output.copies)
    for restore in output.restores:
        queue.advance(restore.request, restore.stop)
    for chunk in output.chunks:
        queue.advance(chunk.request, chunk.stop)
        if chunk.request.num_computed == chunk.request.num_tokens:
            chunk.request.identity.append(1)
            chunk.request.num_tokens += 1
    queue.check_integrity()


def step(queue: Scheduler) -> SchedulerOutput:
    output = queue.schedule()
    computed(queue, output)
    return output


# Prefill: prompts are computed in chunks


def test_a_long_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    queue = scheduler(max_chunk_tokens=8)
    add(queue, request("a", 20))
    assert [spans(step(queue)) for _ in range(5)] == [
        [("a", 0, 8)],
        [("a", 8, 16)],
        [("a", 16, 20)],
        [("a", 20, 21)],
        [("a", 21, 22)],
    ]


def test_chunks_of_several_requests_share_one_pass() -> None:
    queue = scheduler(max_num_batched_tokens=20, max_chunk_tokens=16)
    queue.add(request("a", 10))
    queue.add(request("b", 6))
    queue.add(request("c", 9))
    assert spans(queue.schedule()) == [("a", 0, 10), ("b", 0, 6), ("c", 0, 4)]


def test_a_request_that_waits_for_its_media_leaves_the_pass_to_others() -> None:
    queue = scheduler(max_num_batched_tokens=20, max_chunk_tokens=16)
    first, second = request("a", 30, num_ready=3), request("b", 8)
    queue.add(first)
    queue.add(second)
    assert spans(queue.schedule()) == [("a", 0, 3), ("b", 0, 8)]
    queue.advance(first, 3)
    queue.advance(second, 8)
    second.identity.append(1)
    second.num_tokens += 1
    assert spans(queue.schedule()) == [("b", 8, 9)]
    queue.advance(second, 9)
    first.num_ready = 30
    assert spans(queue.schedule()) == [("a", 3, 19)]


def test_groups_of_a_video_are_prefilled_as_their_embeddings_arrive() -> None:
    """Each arrival makes a chunk; the question behind the video is computed with the last one."""
    queue = scheduler()
    video = request("v", 30, num_ready=2)
    add(queue, video)
    assert spans(step(queue)) == [("v", 0, 2)]
    assert spans(step(queue)) == []
    video.num_ready = 12
    assert spans(step(queue)) == [("v", 2, 12)]
    video.num_ready = 30
    assert spans(step(queue)) == [("v", 12, 30)]
    assert video.is_decoding


def test_what_the_cache_knows_of_a_prompt_is_not_computed_again() -> None:
    """Whole blocks are shared, part of a block is copied; the last token of a prompt is always computed."""
    queue = scheduler()
    add(queue, request("first question", 20))
    step(queue)
    add(queue, request("follow-up", 20), request("f", 12))
    second, third = queue.schedule().chunks[1:]
    assert (second.start, second.stop) == (19, 20)
    assert (third.start, third.stop) == (11, 12)


# Decode: answers grow by a token a pass, and are never held up by prompts


def test_decodes_come_first_and_prefills_share_what_is_left_of_the_budget() -> None:
    queue = scheduler(max_num_batched_tokens=10)
    add(queue, request("a", 4, max_new=20), request("b", 4, max_new=20))
    step(queue)
    add(queue, request("p", 30))
    assert spans(step(queue)) == [("a", 4, 5), ("b", 4, 5), ("p", 0, 8)]
    assert spans(step(queue)) == [("a", 5, 6), ("b", 5, 6), ("p", 8, 16)]


def test_a_budget_smaller_than_the_number_of_answers_serves_the_oldest() -> None:
    queue = scheduler(max_num_batched_tokens=4, max_num_seqs=9)
    add(queue, *(request(name, 1, max_new=20) for name in "abcde"))
    assert spans(step(queue)) == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1), ("d", 0, 1)]
    assert spans(step(queue)) == [("a", 1, 2), ("b", 1, 2), ("c", 1, 2), ("d", 1, 2)]
    queue.remove(queue.running[0])
    assert spans(step(queue)) == [("b", 2, 3), ("c", 2, 3), ("d", 2, 3), ("e", 0, 1)]


def test_drafts_are_computed_together_with_the_token_they_follow() -> None:
    queue = scheduler(max_num_batched_tokens=4)
    answer = request("a", 4, max_new=20)
    add(queue, answer)
    step(queue)
    answer.num_drafts = 9
    (chunk,) = queue.schedule().chunks
    assert (chunk.start, chunk.stop, chunk.num_drafts) == (4, 8, 3), "as many as the budget allows"
    assert chunk.is_sampled


def test_only_drafts_that_were_right_count_as_computed() -> None:
    """Of three drafts two were right: they and the token sampled behind them are new."""
    queue = scheduler()
    answer = request("a", 4, max_new=20)
    add(queue, answer)
    step(queue)
    answer.num_drafts = 3
    queue.schedule()
    for token in (1, 1, 5):
        answer.identity.append(token)
    answer.num_tokens += 3
    queue.advance(answer, 7)
    answer.num_drafts = 0
    queue.check_integrity()
    assert spans(queue.schedule()) == [("a", 7, 8)]


def test_several_answers_to_one_prompt_share_its_blocks() -> None:
    """Room for all of them is reserved with the prompt, which is computed once."""
    queue = scheduler(6, max_num_seqs=3)
    prompt = request("a", 10, max_new=2, num_copies=3)
    add(queue, prompt)
    step(queue)
    assert len(queue.kv.block_table("a")) == 5, "3 for the prompt, and 1 more for each further answer"
    for number in (1, 2):
        copy = ScheduledRequest(
            f"a#{number}", prompt.identity.copy(), 10, 12, num_ready=10, num_tokens=prompt.num_tokens
        )
        queue.kv.copied(queue.fork(prompt, copy))
    assert spans(step(queue)) == [("a", 10, 11), ("a#1", 10, 11), ("a#2", 10, 11)]
    tables = [queue.kv.block_table(name) for name in names(queue.running)]
    assert {tuple(table[:2]) for table in tables} == {(0, 1)}
    assert len({table[2] for table in tables}) == 3, "each goes on in a block of its own"


# Admission: blocks for the whole prompt, first come, first served


def test_room_is_given_first_come_first_served() -> None:
    queue = scheduler()
    for name, length in (("a", 200), ("b", 100), ("c", 8)):
        queue.add(request(name, length))
    queue.schedule()
    assert [each.request_id for each in queue.running] == ["a"]
    assert [each.request_id for each in queue.waiting] == ["b", "c"], "the small one does not overtake"


def test_the_next_request_starts_in_the_pass_after_one_ended() -> None:
    queue = scheduler(4)
    first, second = request("a", 11), request("b", 11)
    add(queue, first, second)
    assert names(step(queue).admitted) == ["a"]
    queue.remove(first)
    assert spans(step(queue)) == [("b", 0, 11)]


def test_no_more_answers_grow_at_once_than_max_num_seqs() -> None:
    queue = scheduler(max_num_seqs=2)
    add(queue, *(request(name, 4) for name in "abc"))
    step(queue)
    assert (names(queue.running), names(queue.waiting)) == (["a", "b"], ["c"])


def test_a_request_of_more_answers_than_max_num_seqs_runs_alone() -> None:
    queue = scheduler(max_num_seqs=2)
    many = request("m", 4, num_copies=5)
    add(queue, request("a", 4), many, request("b", 4))
    step(queue)
    assert names(queue.running) == ["a"]
    queue.remove(queue.running[0])
    step(queue)
    assert (names(queue.running), names(queue.waiting)) == (["m"], ["b"])


def test_what_could_never_fit_is_refused_at_once() -> None:
    queue = scheduler(4)
    with pytest.raises(
        InfeasibleError, match="14 prompt tokens and up to 18 in all does not fit into a KV cache of 16"
    ):
        queue.add(request("a", 14))
    assert not queue.waiting


def test_can_admit_says_whether_a_request_would_run_at_once() -> None:
    """It asks for room and for nobody waiting before it, and changes nothing."""
    queue = scheduler(8)
    add(queue, request("a", 20))
    step(queue)
    small, large = request("s", 4), request("l", 12)
    assert (queue.can_admit(small), queue.can_admit(large)) == (True, False)
    add(queue, large)
    assert not queue.can_admit(small), "it does not overtake the one that waits"
    step(queue)
    assert names(queue.waiting) == ["l"]


@pytest.mark.parametrize("pruned", [(), (PrunedRange(44, 56, num_inputs=14),)], ids=["plain", "pruned"])
def test_a_prompt_that_waits_for_room_is_not_looked_up_in_every_step(
    pruned: tuple[PrunedRange, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first 40 tokens are cached and idle: whether it fits does not follow from free blocks alone."""
    queue = scheduler(40)
    cached = request("w", 40, max_new=1)
    queue.add(cached)
    computed(queue, queue.schedule())
    queue.remove(cached)
    running = request("r", 90, max_new=40)
    queue.add(running)
    computed(queue, queue.schedule())
    queue.add(request("w", 60, pruned=pruned))
    opened: list[str] = []
    opening = KVCacheManager.open

    def count(kv: KVCacheManager, name: str, *args: Any, **options: Any) -> list[BlockCopy]:
        opened.append(name)
        return opening(kv, name, *args, **options)

    monkeypatch.setattr(KVCacheManager, "open", count)
    for _ in range(32):
        computed(queue, queue.schedule())
        queue.check_integrity()
    assert [each.request_id for each in queue.waiting] == ["w"]
    assert len(opened) <= 2
    queue.remove(running)
    assert [each.request_id for each in queue.schedule().admitted] == ["w"]


def test_a_prompt_that_comes_in_the_middle_of_a_pass_is_admitted_at_once() -> None:
    """What the pass computes is what was scheduled; the next one computes the prompt too."""
    queue = scheduler()
    add(queue, request("a", 8))
    output = queue.schedule()
    queue.add(request("b", 8, num_ready=0))
    assert names(queue.admit_early().admitted) == ["b"]
    computed(queue, output)
    assert spans(output) == [("a", 0, 8)]
    queue.running[1].num_ready = 8
    assert spans(step(queue)) == [("a", 8, 9), ("b", 0, 8)]


def test_what_is_admitted_in_the_middle_of_a_pass_leaves_answers_room_for_their_next_tokens() -> None:
    """The 2 blocks of `b` and one for the next tokens of `a` are free; then 1 is, which `c` does not get."""
    queue = scheduler(6)
    add(queue, request("a", 8, max_new=8))
    step(queue)
    queue.add(request("b", 7))
    queue.add(request("c", 3, max_new=1))
    assert names(queue.admit_early().admitted) == ["b"]
    assert queue.kv.num_free_blocks() == 1
    assert step(queue).preemptions == []


def test_what_is_admitted_in_the_middle_of_a_pass_leaves_room_for_drafts_too() -> None:
    """Of 5 free blocks `b` needs 2; the next tokens of `a` take 1, and 3 with eight drafts."""
    for num_drafts, admitted in ((0, ["b"]), (8, [])):
        queue = scheduler(7)
        answer = request("a", 8, max_new=12)
        add(queue, answer)
        step(queue)
        answer.num_drafts = num_drafts
        queue.add(request("b", 11))
        assert names(queue.admit_early().admitted) == admitted


def test_what_was_preempted_does_not_come_back_in_the_middle_of_a_pass() -> None:
    queue = scheduler()
    add(queue, request("a", 8))
    step(queue)
    queue.running[0].num_offloaded = 8
    queue.remove(back := queue.running[0])
    back.num_computed = 0
    queue.add(back)
    assert queue.admit_early().admitted == []
    assert names(queue.schedule().admitted) == ["a"]


# Preemption: answers may outgrow the cache


def outgrow(mode: str) -> tuple[Scheduler, ScheduledRequest, ScheduledRequest]:
    """Two answers of 8 prompt tokens in 6 blocks, and a third request that waits: both have 12 tokens."""
    queue = scheduler(6, preemption=mode)
    older, younger = request("old", 8, max_new=12), request("young", 8, max_new=12)
    add(queue, older, younger)
    for _ in range(5):
        step(queue)
    add(queue, request("waiting", 4))
    assert (older.num_computed, younger.num_computed) == (12, 12)
    return queue, older, younger


def test_the_youngest_is_preempted_and_waits_at_its_old_place() -> None:
    queue, _, _ = outgrow("offload")
    output = step(queue)
    assert [each.request.request_id for each in output.preemptions] == ["young"]
    assert spans(output) == [("old", 12, 13)]
    assert names(queue.waiting) == ["young", "waiting"]
    assert queue.num_preempted == 1


def test_offloaded_tokens_come_back_instead_of_being_computed_again() -> None:
    queue, older, younger = outgrow("offload")
    (preemption,) = step(queue).preemptions
    assert (preemption.num_tokens, len(preemption.block_tables[0])) == (12, 3)
    queue.remove(older)
    queue.kv.clear_idle()
    output = step(queue)
    assert [(each.request, each.start, each.stop) for each in output.restores] == [(younger, 0, 12)]
    assert ("young", 12, 13) in spans(step(queue))


def test_without_offloading_prompt_and_answer_are_computed_again() -> None:
    queue, older, younger = outgrow("recompute")
    assert step(queue).preemptions == []
    assert younger in queue.waiting
    queue.remove(older)
    queue.kv.clear_idle()
    output = step(queue)
    assert output.restores == []
    assert ("young", 0, 13) in spans(output)


def test_what_is_still_cached_is_not_restored() -> None:
    """The blocks of a preempted request stay findable until somebody else takes them."""
    queue, older, younger = outgrow("offload")
    step(queue)
    queue.remove(older)
    (restore,) = step(queue).restores
    assert (restore.request, restore.start, restore.stop) == (younger, 8, 12)


def test_the_first_of_several_answers_comes_back_although_its_prompt_would_not_fit_again() -> None:
    """Its prompt reserved a block for each other answer, and these have their own by now."""
    queue = scheduler(5, max_num_seqs=3)
    prompt = request("a", 8, max_new=9, num_copies=3)
    add(queue, prompt)
    step(queue)
    copies = [
        ScheduledRequest(f"a#{number}", prompt.identity.copy(), 8, 17, num_ready=8, num_tokens=9)
        for number in (1, 2)
    ]
    for copy in copies:
        queue.kv.copied(queue.fork(prompt, copy))
    left, preempted = [prompt, *copies], set[str]()
    for _ in range(60):
        if prompt.num_tokens == 14 and not preempted & {"a"}:
            more_important = request("m", 16, priority=-1, max_new=1)
            add(queue, more_important)
            left.append(more_important)
        preempted |= {each.request.request_id for each in step(queue).preemptions}
        for ended in [each for each in left if each.num_tokens >= each.max_total_tokens]:
            queue.remove(ended)
            left.remove(ended)
    assert left == [], "one waits for more blocks than there are"
    assert "a" in preempted


def test_a_request_whose_blocks_are_being_read_is_not_preempted() -> None:
    """A transfer reads the blocks of the youngest: the one before it gives its blocks up."""
    queue, _, _ = outgrow("offload")
    queue.may_preempt = lambda name: name != "young"
    output = step(queue)
    assert [each.request.request_id for each in output.preemptions] == ["old"]
    assert spans(output) == [("young", 12, 13)]


# Priority goes before age


def test_important_requests_are_prefilled_first_whenever_they_came() -> None:
    queue = scheduler(max_num_batched_tokens=10, max_chunk_tokens=16)
    queue.add(request("b", 8, priority=10))
    queue.add(request("c", 8, priority=10))
    queue.add(request("i", 6))
    assert spans(queue.schedule()) == [("i", 0, 6), ("b", 0, 4)]


def test_the_least_important_gives_way_first_though_it_is_the_oldest() -> None:
    queue = scheduler(6)
    queue.add(request("b", 8, max_new=12, priority=10))
    queue.add(request("i", 10, max_new=12))
    gave_way = []
    for _ in range(8):
        output = queue.schedule()
        gave_way += [each.request.request_id for each in output.preemptions]
        computed(queue, output)
        queue.check_integrity()
    assert gave_way == ["b"]
    assert [each.request_id for each in queue.running] == ["i"]


def test_batch_requests_make_room_at_once_for_an_interactive_one() -> None:
    """All seats are taken by long answers that nobody waits for; the youngest of them gives its seat up."""
    queue = scheduler(max_num_seqs=2)
    for name in ("b", "c"):
        queue.add(request(name, 8, max_new=100, priority=10))
    computed(queue, queue.schedule())
    queue.add(request("i", 8))
    output = queue.schedule()
    assert [each.request.request_id for each in output.preemptions] == ["c"]
    assert spans(output) == [("b", 8, 9), ("i", 0, 8)]
    assert [each.request_id for each in queue.waiting] == ["c"]
    computed(queue, output)
    queue.remove(queue.running[0])
    assert [each.request_id for each in queue.schedule().admitted] == ["c"]


def test_nobody_gives_way_where_that_makes_no_room() -> None:
    """Neither to one of the same priority, nor to one for which all less important ones are not enough."""
    queue = scheduler(8)
    queue.add(request("b", 4, max_new=8, priority=10))
    queue.add(request("k", 18, max_new=8))
    computed(queue, queue.schedule())
    queue.add(request("i", 12))
    queue.add(request("c", 4, priority=10))
    assert not queue.schedule().preemptions
    assert [each.request_id for each in queue.waiting] == ["i", "c"]
    assert not queue.can_admit(request("d", 1, priority=10))


# Held requests: a video's blocks outlive its request, and questions begin with them


def test_questions_begin_where_a_held_request_ends() -> None:
    """Even without a prefix cache: the question names the request that it continues."""
    queue = Scheduler(SchedulerConfig(), KVCacheManager(KVCacheSpec((64,), 4), enable_prefix_caching=False))
    video = request("v", 16, max_new=1)
    add(queue, video)
    step(queue)
    queue.remove(video, hold=True)
    tokens = [*video.identity.rows[:16, 0].tolist(), 7, 8]
    question = ScheduledRequest("q", token_identity(tokens), 18, 22, num_ready=18, parent="v")
    add(queue, question)
    assert spans(step(queue)) == [("q", 16, 18)]
    queue.release("v")
    queue.check_integrity()
    assert list(queue.kv.block_table("q"))[:4] == [0, 1, 2, 3]


def test_a_held_request_can_be_taken_back_at_its_old_place() -> None:
    queue = scheduler()
    add(queue, request("a", 4, max_new=20), request("b", 4, max_new=20))
    step(queue)
    moved = queue.running[0]
    queue.remove(moved, hold=True)
    assert queue.is_held("a")
    assert spans(step(queue)) == [("b", 4, 5)]
    queue.take_back(moved)
    assert spans(step(queue)) == [("a", 4, 5), ("b", 5, 6)]


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_prompt_kept_for_a_move_goes_before_an_answer_does_unless_it_is_being_sent(is_sent: bool) -> None:
    """Of four blocks, one has the end of the prompt alone, which the answer needs when it is the fourth."""
    queue = scheduler(num_blocks=4)
    queue.add(request("a", 6, max_new=10))
    step(queue)
    queue.kv.copied(queue.prompts.keep("a", "a"))
    assert queue.prompts.send("a")
    if not is_sent:
        queue.prompts.take_back("a")
    for _ in range(8):
        step(queue)
    assert (queue.prompts.id_of("a") in queue.kv, queue.num_preempted) == (is_sent, is_sent)


def test_a_child_that_finds_no_room_files_no_block_that_was_never_written() -> None:
    """Its part of a block would have been a copy; the copy is not carried out where the child must wait."""
    queue = scheduler(8)
    held = request("h", 6, max_new=1)
    queue.add(held)
    computed(queue, queue.schedule())
    queue.remove(held, hold=True)
    question = [*(np.arange(6) + 100 * ord("h")).tolist(), *range(25)]
    child = ScheduledRequest("child", token_identity(question), 31, 32, num_ready=31, parent="h")
    queue.add(child)
    assert queue.kv.num_cached(child.identity) == 4
    for _ in range(2):
        output = queue.schedule()
        assert not output.admitted
        assert not output.copies
        assert queue.kv.num_cached(child.identity) == 4, "the last 2 tokens of the held one are not filed"
        queue.check_integrity()
    queue.release("h")
    assert queue.kv.num_cached(child.identity) == 6


# Pruning: of some visual tokens all are computed and few stay


def test_a_pruned_range_is_computed_at_once_whatever_the_limits_of_a_chunk() -> None:
    """Tokens 4 to 6 are what stays of 12 inputs: a choice among all of them needs all of them in one pass."""
    queue = scheduler(max_num_batched_tokens=8, max_chunk_tokens=8)
    add(queue, request("a", 10, pruned=(PrunedRange(4, 7, num_inputs=12),)))
    assert spans(step(queue)) == [("a", 0, 4)]
    (chunk,) = step(queue).chunks
    assert (chunk.start, chunk.stop, chunk.num_inputs) == (4, 7, 12)
    assert spans(step(queue)) == [("a", 7, 10)]
    assert len(queue.kv.block_table("a")) == 3, "what does not stay has given its blocks back"


# Decodes that go on before their last tokens are known


def decoding(queue: Scheduler, *requests: ScheduledRequest) -> None:
    add(queue, *requests)
    while any(not each.is_decoding for each in requests):
        step(queue)


def go_on(queue: Scheduler, request: ScheduledRequest) -> None:
    """Does what the engine does with the token of a decode that it has read."""
    request.identity.append(1)
    request.num_tokens += 1
    queue.advance_one(request)
    queue.check_integrity()


def test_a_decode_goes_on_behind_a_token_that_nobody_knows_but_not_past_its_last() -> None:
    queue = scheduler()
    long, short = request("a", 5, max_new=9), request("b", 5, max_new=2)
    decoding(queue, long, short)
    assert names(queue.decodes_ahead(unread=())) == ["a", "b"]
    assert names(queue.decodes_ahead(unread=(long,))) == ["a", "b"]
    assert names(queue.decodes_ahead(unread=(long, short))) == ["a"]


def test_prompts_are_cut_beside_decodes_but_not_those_that_are_under_way_or_wait() -> None:
    """For media or grammars; what ends under way decodes behind its first token."""
    queue = scheduler(max_num_batched_tokens=6)
    answer = request("a", 5, max_new=9)
    decoding(queue, answer)
    waits, asks, last = request("b", 8, num_ready=0), request("c", 5, may_sample=False), request("d", 9)
    add(queue, waits, asks)
    step(queue)
    assert names(queue.decodes_ahead(())) == ["a"]
    assert queue.prefills_ahead(1, ()) == []
    waits.num_ready, asks.may_sample = 4, True
    add(queue, last)
    queue.admit_early()
    found = queue.prefills_ahead(1, ())
    assert found is not None
    assert [(each.request.request_id, each.start, each.stop) for each in found] == [
        ("b", 0, 4),
        ("c", 4, 5),
    ]
    found = queue.prefills_ahead(2, (waits, asks))
    assert found is not None
    assert [(each.request.request_id, each.start, each.stop) for each in found] == [("d", 0, 4)]
    assert names(queue.decodes_ahead((answer, asks))) == ["a", "c"]


def test_a_pass_ahead_has_no_more_decodes_than_a_pass_takes() -> None:
    queue = scheduler(max_num_batched_tokens=6)
    decoding(queue, *(request(name, 1, max_new=9) for name in "abcdef"))
    assert len(queue.decodes_ahead(())) == 6
    queue.config = replace(queue.config, max_num_batched_tokens=5)
    assert queue.decodes_ahead(()) == []


def test_room_in_windows_is_made_for_prompts_ahead_unless_others_had_to_be_preempted() -> None:
    spec = KVCacheSpec((64, 7), 4, 0, (None, 4), 8)
    queue = Scheduler(SchedulerConfig(max_chunk_tokens=8), KVCacheManager(spec))
    prompt, other = request("a", 40), request("b", 24)
    add(queue, prompt)
    step(queue)
    queue.kv.open("b", other.identity, max_cached=0, num_ahead=24)
    queue.kv.allocate("b", 4 * queue.kv.num_free_blocks(1))
    num_held = queue.kv.num_held_blocks("a", 1)
    assert queue.kv.num_free_blocks(1) == 0
    assert queue.prefills_ahead(0, ()) is None
    assert (queue.running, queue.kv.num_held_blocks("a", 1)) == ([prompt], num_held)
    queue.kv.free("b")
    assert queue.prefills_ahead(0, ()) is not None
    assert queue.kv.num_held_blocks("a", 1) > num_held


def test_nothing_is_admitted_while_the_queue_has_no_room_but_for_somebody_more_important() -> None:
    queue = scheduler(max_num_seqs=1)
    decoding(queue, request("a", 5, max_new=9))
    assert not queue.may_admit()
    add(queue, request("b", 5))
    assert not queue.may_admit()
    queue.config = replace(queue.config, max_num_seqs=2)
    assert queue.may_admit()
    queue.config = replace(queue.config, max_num_seqs=1)
    add(queue, request("c", 5, priority=-1))
    assert queue.may_admit()


def test_room_ahead_preempts_nobody() -> None:
    queue = scheduler(num_blocks=4)
    first, second = request("a", 6, max_new=9), request("b", 6, max_new=2)
    decoding(queue, first, second)
    assert queue.make_room_ahead(first, 8)
    assert not queue.make_room_ahead(first, 9)
    assert queue.running == [first, second]
    assert queue.kv.num_held_blocks("a") == 2


@pytest.mark.parametrize("preempts", [False, True])
def test_the_cache_knows_of_whole_blocks_at_once_and_of_all_tokens_at_the_end(preempts: bool) -> None:
    """Prompt 5, then token after token: blocks are whole with 8 and 12."""
    queue = scheduler(num_blocks=5, preemption="recompute", max_num_seqs=1)
    answer = request("a", 5, max_new=9)
    decoding(queue, answer)
    held = []
    for _ in range(6):
        assert queue.make_room_ahead(answer, answer.num_held + 1)
        go_on(queue, answer)
        held.append(queue.kv.num_tokens("a"))
    assert held == [5, 5, 8, 8, 8, 8]
    assert queue.kv.num_cached(answer.identity) == 8
    if preempts:
        add(queue, request("b", 7, priority=-1))
        assert names(queue.schedule().admitted) == ["b"]
        assert queue.waiting == [answer]
    else:
        queue.remove(answer)
    assert queue.kv.num_cached(answer.identity) == 11
