"""Capacity follows the use of the cache: up while there is room, down on preemptions."""

from actors.policies.capacity import PATIENCE, Capacity, Load


def at(now: int, least: int = 8, most: int = 512) -> Capacity:
    return Capacity(now, least, most)


def window(capacity: Capacity, use: float, queued: float = 0.0, preemptions: int = 0) -> int:
    """Capacity after a whole window of such a load, all leased."""
    load = Load(use, preemptions, 100, int(100 * queued))
    capacity.observe(load, capacity.now, capacity.now)
    return capacity.now


def test_the_first_capacity_is_what_the_cache_holds_with_a_seat_for_each() -> None:
    def first(tokens: int, seats: int = 256, least: int = 8, most: int = 0) -> int:
        return Capacity.of(tokens, 2440, seats, least, most).now

    assert first(749_000) == 256 and first(749_000, seats=1000) == 306
    assert first(749_000, most=100) == 100 and first(749_000, most=1000) == 256
    assert first(1000) == 8  # a group fits in any case: siblings are leased together


def test_it_grows_towards_a_full_cache_and_stops_there() -> None:
    capacity = at(100)
    assert window(capacity, 0.3) == 125  # by a quarter at most
    assert window(capacity, 0.85) == 137  # to .935
    assert window(capacity, 0.90) == window(capacity, 0.97) == 137
    assert window(capacity, 0.99) == 129


def test_a_window_is_as_many_rollouts_as_are_in_flight() -> None:
    capacity = at(100)
    assert not capacity.observe(Load(0.5, 0, 10, 0), 60, 100)
    assert not capacity.observe(Load(0.95, 0, 10, 0), 39, 100)
    assert not capacity.observe(Load(0.5, 0, 10, 0), 1, 100)  # .95 was in it
    assert capacity.observe(Load(0.5, 0, 10, 0), 100, 100)


def test_rollouts_that_fail_fill_a_window_that_may_only_lower_it() -> None:
    capacity = at(100)
    assert capacity.observe(Load(0.99, 0, 10, 0), 10, 100, failed=90) and capacity.now == 94
    capacity = at(100)
    for _ in range(5):  # their contexts were short, say: retrieval was down
        assert not capacity.observe(Load(0.3, 0, 10, 0), 10, 100, failed=90)
    assert capacity.observe(Load(0.3, 0, 10, 0), 50, 100) and capacity.now == 125


def test_more_are_of_no_use_where_a_seat_is_waited_for_or_nothing_is_leased() -> None:
    capacity = at(100)
    assert window(capacity, 0.5, queued=0.6) == 100
    assert window(capacity, 0.5, queued=0.4) == 125
    capacity.observe(Load(0.5, 0, 100, 0), 125, 117)  # room for a group of 8 was left
    assert capacity.now == 125
    capacity.observe(Load(0.5, 0, 100, 0), 125, 118)
    assert capacity.now == 156


def test_a_preemption_lowers_it_at_once_by_its_share() -> None:
    capacity = at(100)
    assert capacity.observe(Load(1.0, 1, 10, 0), 3, 100) and capacity.now == 99
    capacity = at(100)
    assert capacity.observe(Load(1.0, 20, 10, 0), 3, 100) and capacity.now == 90
    capacity = at(100)
    assert capacity.observe(Load(1.0, 500, 10, 0), 3, 100) and capacity.now == 80


def test_what_is_in_flight_comes_down_before_the_next_look() -> None:
    capacity = at(100)
    capacity.observe(Load(1.0, 20, 10, 0), 0, 100)
    assert not capacity.observe(Load(1.0, 9, 10, 0), 60, 95)
    assert not capacity.observe(Load(1.0, 9, 10, 0), 40, 90)
    assert capacity.observe(Load(1.0, 9, 10, 0), 1, 90)


def test_it_returns_to_where_something_was_preempted_only_after_long() -> None:
    capacity = at(100)
    capacity.observe(Load(1.0, 20, 10, 0), 0, 100)
    capacity.observe(Load(), 100, 90)  # settled
    ended = 100
    while ended + capacity.now < PATIENCE:
        ended += capacity.now
        assert window(capacity, 0.5) == 90
    assert window(capacity, 0.5) == 112


def test_it_keeps_to_its_bounds() -> None:
    assert window(at(9), 0.99) == 8 and window(at(500), 0.5) == 512
    assert window(at(8), 1.0, preemptions=50) == 8
    fixed = Capacity.of(10_000, 100, 64, 16, 16)
    assert window(fixed, 0.1) == window(fixed, 1.0, preemptions=9) == 16
