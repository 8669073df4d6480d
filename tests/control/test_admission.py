"""Who waits, who is refused, and when the refused are told to come again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.control.admission import AdmissionQueue, QueueSummary, has_place
from epd.errors import OverloadedError

NEVER_S = 1e9


def placed_every(seconds: float, count: int = 50) -> AdmissionQueue:
    """A queue that has found room for one request in so many seconds, while others waited."""
    queue = AdmissionQueue(1000)
    for number in range(count + 2):
        queue.enter(str(number), 0.0, NEVER_S)
    for number in range(count):
        queue.place(str(number), number * seconds)
    for number in (count, count + 1):
        queue.leave(str(number))
    return queue


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    queue = AdmissionQueue(2)
    queue.enter("a", 0.0, NEVER_S)
    queue.enter("b", 0.0, NEVER_S)
    with pytest.raises(OverloadedError, match="allowed 2") as refusal:
        queue.enter("c", 0.0, NEVER_S)
    assert refusal.value.retry_after_s == 1.0
    assert queue.num_refused == 1
    queue.leave("a")
    queue.enter("c", 0.0, NEVER_S)
    assert len(queue) == 2


def test_waits_are_expected_by_the_rate_that_was_measured() -> None:
    queue = placed_every(2.0)
    assert queue.expected_wait_s(4) == pytest.approx(10.0)
    queue.enter("a", 100.0, NEVER_S)
    queue.check(100.0, deadline_s=105.0)
    with pytest.raises(OverloadedError) as refusal:
        queue.check(100.0, deadline_s=103.0)
    assert refusal.value.retry_after_s == pytest.approx(4.0)


def test_a_pause_after_many_that_found_room_refuses_nobody_who_can_be_served() -> None:
    """200 come at once; 64 find room, then none for 10 s, as a worker is lost, and then the next."""
    queue = AdmissionQueue(1000)
    for number in range(200):
        queue.enter(str(number), 0.0, 120.0)
    for number in range(64):
        queue.place(str(number), number * 0.05)
    queue.place("64", 13.0)
    for number in range(65, 200):
        queue.check_deadline(str(number), 13.0)
    assert 0.2 < queue.expected_wait_s(0) < 0.4


def test_the_time_until_a_lost_worker_is_back_is_no_pace() -> None:
    """Few have found room before the loss, and none for as long as a worker takes to start."""
    queue = AdmissionQueue(1000)
    for number in range(200):
        queue.enter(str(number), 0.0, 600.0)
    for number in range(4):
        queue.place(str(number), number * 0.05)
    queue.interrupt()
    queue.place("4", 55.0)
    for number in range(5, 200):
        queue.check_deadline(str(number), 55.0)


def test_the_first_token_counts_into_what_a_deadline_must_allow() -> None:
    queue = placed_every(0.1)
    queue.record_first_token(5.0)
    queue.enter("a", 0.0, NEVER_S)
    with pytest.raises(OverloadedError):
        queue.check(0.0, deadline_s=4.0)
    queue.check(0.0, deadline_s=6.0)


def test_an_empty_queue_takes_whatever_comes() -> None:
    queue = placed_every(10.0)
    queue.check(0.0, deadline_s=0.1)


def test_idle_time_between_requests_is_no_service_time() -> None:
    queue = AdmissionQueue(10)
    for number in range(5):
        queue.enter("a", number * 100.0, NEVER_S)
        queue.place("a", number * 100.0 + 0.1)
    assert queue.expected_wait_s(10) == 0.0


def test_what_is_done_again_goes_first_and_is_never_refused() -> None:
    queue = AdmissionQueue(1)
    queue.enter("new", 0.0, NEVER_S)
    queue.enter("again", 0.0, NEVER_S, is_new=False)
    assert queue.is_turn("again")
    assert not queue.is_turn("new")
    assert queue.is_turn("new", 2)


def test_a_request_that_many_overtake_gets_a_turn_of_its_own() -> None:
    queue = AdmissionQueue(100)
    queue.enter("large", 0.0, NEVER_S)
    for number in range(40):
        queue.enter(str(number), 0.0, NEVER_S)
    for number in range(32):
        assert queue.is_turn(str(number), 8)
        queue.place(str(number), 0.0)
    assert queue.is_turn("large", 8)
    assert not queue.is_turn("32", 8)
    queue.place("large", 0.0)
    assert queue.is_turn("32", 8)


def test_requests_on_their_way_to_the_queue_count() -> None:
    queue = AdmissionQueue(3)
    queue.enter("a", 0.0, NEVER_S)
    queue.check(0.0, NEVER_S, num_coming=1)
    with pytest.raises(OverloadedError):
        queue.check(0.0, NEVER_S, num_coming=2)


def test_past_its_deadline_a_request_waits_no_longer() -> None:
    queue = AdmissionQueue(1)
    queue.enter("a", 0.0, 10.0)
    queue.check_deadline("a", 9.0)
    with pytest.raises(OverloadedError):
        queue.check_deadline("a", 11.0)


def test_a_burst_before_anything_was_measured_is_cut_to_size_as_soon_as_something_is() -> None:
    queue = AdmissionQueue(100)
    for number in range(20):
        queue.enter(str(number), 0.0, 10.0)
    for number in range(5):
        queue.place(str(number), 1.0 + number)
    for number in range(5, 20):
        refuses = pytest.raises(OverloadedError) if number > 10 else nullcontext()
        with refuses:
            queue.check_deadline(str(number), 5.0)


def test_batch_requests_wait_behind_all_interactive_ones() -> None:
    """Whenever they came; even one that is done again lets a new interactive one go first."""
    queue = AdmissionQueue(10)
    queue.enter("batch", 0.0, NEVER_S, priority=10)
    queue.enter("batch again", 1.0, NEVER_S, is_new=False, priority=10)
    assert queue.first(8) == ["batch again", "batch"]
    queue.enter("chat", 2.0, NEVER_S)
    queue.enter("urgent", 3.0, NEVER_S, priority=-1)
    assert queue.first(8) == ["urgent"]
    queue.place("urgent", 4.0)
    assert queue.first(8) == ["chat"]
    assert not queue.is_turn("batch again", 8)
    queue.place("chat", 5.0)
    assert queue.first(8) == ["batch again", "batch"]


def test_a_queue_full_of_batch_requests_has_room_for_interactive_ones() -> None:
    """Which wait for nobody behind them; batch requests find it full of either kind."""
    queue = AdmissionQueue(4)
    for number in range(4):
        queue.enter(f"batch {number}", 0.0, NEVER_S, priority=10)
    with pytest.raises(OverloadedError, match="4 requests wait; allowed 4"):
        queue.enter("one more", 0.0, NEVER_S, priority=10)
    for number in range(4):
        queue.enter(f"chat {number}", 0.0, NEVER_S)
    for priority in (0, -5):
        with pytest.raises(OverloadedError):
            queue.enter("late", 0.0, NEVER_S, priority=priority)


def test_an_interactive_request_does_not_expect_to_wait_for_batch_ones() -> None:
    queue = placed_every(2.0)
    for number in range(20):
        queue.enter(f"batch {number}", 100.0, NEVER_S, priority=10)
    queue.check(100.0, deadline_s=101.0)
    with pytest.raises(OverloadedError):
        queue.check(100.0, deadline_s=101.0, priority=10)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "again", "place", "leave"]),
            st.integers(0, 5),
            st.sampled_from([-1, 0, 7]),
        )
    )
)
def test_the_queue_is_bounded_and_in_order(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain list of (priority, is new, number of arrival, id); batch ones are not counted against
    others."""
    queue, model = AdmissionQueue(3), list[tuple[int, bool, int, str]]()
    for number, (step, name, priority) in enumerate(steps):
        request_id = str(name)
        is_there = any(each[3] == request_id for each in model)
        if step == "enter" and not is_there:
            if sum(each[0] <= max(priority, 0) for each in model) >= 3:
                with pytest.raises(OverloadedError):
                    queue.enter(request_id, number, NEVER_S, priority=priority)
            else:
                queue.enter(request_id, number, NEVER_S, priority=priority)
                model.append((priority, True, number, request_id))
        elif step == "again" and not is_there:
            queue.enter(request_id, number, NEVER_S, is_new=False, priority=priority)
            model.append((priority, False, number, request_id))
        elif step in ("place", "leave"):
            (queue.leave if step == "leave" else lambda i, now=number: queue.place(i, now))(request_id)
            model = [each for each in model if each[3] != request_id]
        model.sort()
        assert len(queue) == len(model)
        for place in range(len(model) + 1):
            first = [each[3] for each in model[:place] if each[0] == model[0][0]]
            assert queue.first(place) == first


# Several clients


def test_clients_take_turns_whoever_came_first() -> None:
    queue, order = AdmissionQueue(100), []
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "c2"):
        queue.enter(name, 0.0, NEVER_S, client=name[0])
    for number in range(9):
        order += queue.first()
        queue.place(order[-1], float(number))
        if number == 3:  # a2 and c2 are left of this turn
            queue.enter("b2", 4.0, NEVER_S, client="b")
            queue.enter("d1", 4.0, NEVER_S, client="d")
    assert order == ["a1", "b1", "c1", "a2", "c2", "b2", "d1", "a3", "a4"]


def test_a_client_has_as_many_requests_in_a_turn_as_it_weighs() -> None:
    queue, order = AdmissionQueue(100), []
    for name in ("a1", "a2", "a3", "a4", "a5", "a6", "b1", "b2", "b3"):
        queue.enter(name, 0.0, NEVER_S, client=name[0], weight=2 if name[0] == "a" else 1)
    for number in range(9):
        order += queue.first()
        queue.place(order[-1], float(number))
    assert order == ["a1", "b1", "a2", "a3", "b2", "a4", "a5", "b3", "a6"]


def test_a_weight_lets_a_request_in_that_would_come_too_late_a_turn_later() -> None:
    queue = placed_every(2.0)
    for name in ("a1", "b1", "b2", "c1", "c2"):
        queue.enter(name, 100.0, NEVER_S, client=name[0])
    with pytest.raises(OverloadedError):
        queue.check(100.0, 110.0, client="a", weight=1)
    queue.check(100.0, 110.0, client="a", weight=2)


def test_what_waits_of_others_is_no_reason_to_expect_a_late_turn() -> None:
    queue = placed_every(2.0)
    for number in range(20):
        queue.enter(f"many {number}", 100.0, NEVER_S, client="many")
    queue.check(100.0, deadline_s=105.0, client="one")
    with pytest.raises(OverloadedError, match="deadline"):
        queue.check(100.0, deadline_s=105.0, client="many")


def test_one_client_may_take_all_places_but_not_those_for_others() -> None:
    assert [has_place(num, num, 8) for num in (7, 8)] == [True, False]
    assert [has_place(num, 0, 8) for num in (8, 9, 10)] == [True, True, False]
    assert not has_place(8, 1, 8), "an eighth is not few"
    assert not has_place(7, 0, 7), "seven places have no eighth"
    queue = AdmissionQueue(8)
    for number in range(8):
        queue.enter(f"many {number}", 0.0, NEVER_S, client="many")
    with pytest.raises(OverloadedError):
        queue.enter("one too many", 0.0, NEVER_S, client="many")
    for client in ("one", "two"):
        queue.enter(client, 0.0, NEVER_S, client=client)
    with pytest.raises(OverloadedError):
        queue.enter("three", 0.0, NEVER_S, client="three")
    assert queue.first(3) == ["many 0", "one", "two"]


# Several queues over the same workers


def test_requests_in_other_queues_count_as_waiting() -> None:
    queue = AdmissionQueue(3)
    queue.others = QueueSummary(num_waiting=2)
    queue.enter("a", 0.0, NEVER_S)
    with pytest.raises(OverloadedError, match="3 requests wait; allowed 3"):
        queue.enter("b", 0.0, NEVER_S)
    queue.others = QueueSummary(num_waiting=1)
    queue.enter("b", 0.0, NEVER_S)


def test_a_queue_says_who_waits_with_a_user() -> None:
    queue = AdmissionQueue(10)
    assert queue.summary() == QueueSummary()
    queue.enter("batch", 1.0, NEVER_S, priority=1)
    queue.enter("a", 2.0, NEVER_S)
    queue.enter("b", 3.0, NEVER_S)
    assert queue.summary() == QueueSummary(2, 2.0)


def test_an_older_request_of_another_queue_goes_first_for_a_short_time_on_each_turn() -> None:
    queue = AdmissionQueue(10)
    for name in "ab":
        queue.enter(name, 10.0, NEVER_S)
    assert queue.is_turn("a", now_s=11.0)
    queue.others = QueueSummary(1, 8.0)
    assert not queue.is_turn("a", now_s=11.0)
    assert not queue.is_turn("a", now_s=11.2)
    assert queue.is_turn("a", now_s=11.3)
    queue.place("a", 11.4)
    assert [queue.is_turn("b", now_s=now_s) for now_s in (11.5, 11.7, 11.8)] == [False, False, True]


@pytest.mark.parametrize("others", [None, QueueSummary(), QueueSummary(1, 9.8), QueueSummary(1, 12.0)])
def test_nobody_waits_for_requests_that_are_not_older(others: QueueSummary | None) -> None:
    """Or only by less than what is known of them is old."""
    queue = AdmissionQueue(10)
    queue.enter("a", 10.0, NEVER_S)
    queue.others = others
    assert queue.is_turn("a", now_s=11.0)


def test_a_retried_request_waits_for_no_other_queue() -> None:
    queue = AdmissionQueue(10)
    queue.others = QueueSummary(1, 0.0)
    queue.enter("a", 10.0, NEVER_S, is_new=False)
    assert queue.is_turn("a", now_s=10.0)
    queue.leave("a")
    assert not queue.is_turn("a", now_s=10.0)
