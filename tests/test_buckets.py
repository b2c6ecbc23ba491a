"""The plan of buckets is a partition with caps, and places in a bucket are aligned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.peers.buckets import ALIGNMENT, Item, aligned_offsets, plan_buckets

ITEMS = st.lists(
    st.builds(Item, elements=st.integers(0, 40), itemsize=st.sampled_from([2, 4, 8]), kind=st.sampled_from("abc"))
)
CAPS = st.integers(0, 200)


@st.composite
def ordered_items(draw: st.DrawFn) -> tuple[list[Item], list[int]]:
    items = draw(ITEMS)
    return items, draw(st.permutations(range(len(items))))


@given(ordered_items(), CAPS, CAPS)
def test_every_item_is_in_one_bucket_in_the_order_given(
    given: tuple[list[Item], list[int]], cap: int, first_cap: int
) -> None:
    items, order = given
    plan = plan_buckets(items, order, cap, first_cap)
    assert sorted(place for bucket in plan for place in bucket) == list(range(len(items)))
    when = {place: number for number, place in enumerate(order)}
    for bucket in plan:
        assert bucket
        assert [when[place] for place in bucket] == sorted(when[place] for place in bucket)
        assert len({items[place].kind for place in bucket}) == 1
    completed = [max(when[place] for place in bucket) for bucket in plan]
    assert completed == sorted(completed)


@given(ordered_items(), CAPS, CAPS)
def test_a_bucket_is_open_below_its_cap_and_closed_at_it(
    given: tuple[list[Item], list[int]], cap: int, first_cap: int
) -> None:
    items, order = given
    plan = plan_buckets(items, order, cap, first_cap)
    sizes = [[items[place].nbytes for place in bucket] for bucket in plan]
    for size in sizes:
        assert sum(size[:-1]) < max(cap, 1)
    not_full = [items[bucket[0]].kind for bucket, size in zip(plan, sizes, strict=True) if sum(size) < cap]
    # Only a kind's last bucket may be left open; beyond these one may have closed early, the first.
    assert len(not_full) <= len(set(not_full)) + 1


@given(ordered_items(), CAPS, CAPS)
def test_the_first_bucket_to_be_full_closes_at_the_first_cap(
    given: tuple[list[Item], list[int]], cap: int, first_cap: int
) -> None:
    items, order = given
    filled: dict[object, int] = {}
    for taken, place in enumerate(order, 1):
        filled[items[place].kind] = filled.get(items[place].kind, 0) + items[place].nbytes
        if filled[items[place].kind] >= min(cap, first_cap):
            first = [other for other in order[:taken] if items[other].kind == items[place].kind]
            assert first in plan_buckets(items, order, cap, first_cap)
            return


@given(ordered_items(), CAPS)
def test_a_cap_of_nothing_gives_each_a_bucket(given: tuple[list[Item], list[int]], first_cap: int) -> None:
    items, order = given
    assert plan_buckets(items, order, 0, first_cap) == [[place] for place in order]


def test_an_example() -> None:
    items = [Item(elements, 4, "float32") for elements in (10, 20, 30, 5)]
    assert plan_buckets(items, [3, 2, 1, 0], cap=150, first_cap=20) == [[3], [2, 1], [0]]
    assert plan_buckets(items, [3, 2, 1, 0], cap=1000, first_cap=1000) == [[3, 2, 1, 0]]
    assert plan_buckets(items, [], cap=1, first_cap=1) == []


@given(st.lists(st.integers(0, 100)), st.sampled_from([1, 2, 4, 8, 16]))
def test_places_are_aligned_and_do_not_overlap(sizes: list[int], itemsize: int) -> None:
    offsets, end = aligned_offsets(sizes, itemsize)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset * itemsize % ALIGNMENT == 0 for offset in [*offsets, end])
    assert all(before <= after for before, after in zip(ends, [*offsets, end][1:], strict=True))
    waste = end * itemsize - sum(sizes) * itemsize
    assert 0 <= waste <= ALIGNMENT * len(sizes)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_what_fits_exactly_wastes_nothing(itemsize: int) -> None:
    assert aligned_offsets([ALIGNMENT // itemsize] * 3, itemsize)[1] * itemsize == 3 * ALIGNMENT
