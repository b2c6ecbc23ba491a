"""Links: quantities with units, the text form, and the costs of collectives against their schedules played out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.quantities import BANDWIDTHS, SIZES, TIMES, print_quantity, read_quantity
from paceline.virtual.links import (
    Link,
    exchange_end,
    exposed_seconds,
    parse_link,
    ring_bytes,
    ring_seconds,
    server_bytes,
    server_seconds,
    tree_seconds,
    two_level_seconds,
)

links = st.builds(
    Link,
    latency=st.just(0.0) | st.floats(1e-12, 1e3),
    bandwidth=st.just(math.inf) | st.floats(1e-3, 1e15),
)
real_links = st.builds(Link, latency=st.floats(1e-9, 1e-1), bandwidth=st.floats(1e3, 1e12))

# Text -----------------------------------------------------------------------------------------------------


@given(links)
def test_a_link_is_read_back_from_its_text(link: Link) -> None:
    assert parse_link(str(link)) == link
    assert parse_link(link) is link


@given(value=st.floats(0, 1e300), units=st.sampled_from([TIMES, SIZES, BANDWIDTHS]))
def test_a_quantity_is_read_back_exactly(value: float, units: dict[str, object]) -> None:
    assert read_quantity(print_quantity(value, units), units) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [
        ("10us 1Gbit/s", 1e-5, 1.25e8),
        ("1Gbit/s, 10us", 1e-5, 1.25e8),
        (" 0.5 µs 25 MB/s ", 5e-7, 25e6),
        ("25MB/s", 0, 25e6),
        ("1ms", 1e-3, math.inf),
        ("1e-3s 8bit/s", 1e-3, 1),
        ("1GiB/s", 0, 2**30),
        ("instant", 0, math.inf),
    ],
)
def test_texts_are_read_as_meant(text: str, latency: float, bandwidth: float) -> None:
    assert parse_link(text) == Link(latency=latency, bandwidth=bandwidth)


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (Link(latency=1e-5, bandwidth=1.25e8), "10us 1Gbit/s"),
        (Link(bandwidth=25e6), "25MB/s"),
        (Link(latency=5e-7), "0.5us"),
        (Link(), "instant"),
    ],
)
def test_texts_are_short(link: Link, text: str) -> None:
    assert str(link) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wanted a number with a unit, found ''"),
        ("fast", "wanted a number with a unit, found 'fast'"),
        ("10us fast", "found 'fast'"),
        ("10", "10 has no unit; known are s ms us ns; Gbit/s"),
        ("10us 20us", "latency is given twice, the second time as 20us"),
        ("1Gbps", "write bit for bits and B for bytes"),
        ("1Mb/s", "write bit for bits and B for bytes"),
        ("10parsec", "10parsec has an unknown unit"),
        ("-3us", "0 or more seconds, got -3e-06"),
        ("0MB/s", "above 0 bytes a second, got 0"),
        ("1e400s", "that a float can hold, found 1e400"),
        ("1e9999999999s", "a number that a float can hold"),
        ("nan us", "found 'nan us'"),
    ],
)
def test_a_bad_text_is_told_what_was_wanted_with_an_example(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_link(text)
    told = str(caught.value)
    assert f"cannot read the link {text!r}: " in told and message in told
    assert 'Examples: "10us 1Gbit/s"' in told and "\n" not in told


@given(st.text(alphabet="0123456789.e+-, usmnGMkKBbit/µ", max_size=30))
def test_any_text_is_a_link_or_a_usage_error(text: str) -> None:
    try:
        link = parse_link(text)
    except UsageError:
        return
    assert parse_link(str(link)) == link


def test_what_cannot_be_a_link_or_a_message_is_refused() -> None:
    with pytest.raises(UsageError, match="wanted a link or its text form, got 3"):
        parse_link(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="latency wants a number"):
        Link(latency="1us")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="got nan"):
        Link(bandwidth=math.nan)
    link = parse_link("10us 1Gbit/s")
    for nbytes in (-1, math.nan):
        with pytest.raises(UsageError, match="0 or more bytes"):
            link.seconds(nbytes)
    for seconds in (server_seconds, ring_seconds, tree_seconds):
        with pytest.raises(UsageError, match="at least 1 worker, got 0"):
            seconds(link, 1, 0)
        with pytest.raises(UsageError, match="0 or more bytes"):
            seconds(link, -1, 2)


# Costs ----------------------------------------------------------------------------------------------------


def test_a_message_takes_latency_and_bytes() -> None:
    assert parse_link("10us 1Gbit/s").seconds(25e6) == pytest.approx(0.20001)
    assert parse_link("10us").seconds(1e12) == 1e-5
    assert parse_link("1kB/s").seconds(0) == 0


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 13])
def test_a_ring_played_out_sums_everything_in_its_time_and_bytes(workers: int) -> None:
    link = Link(latency=0.5, bandwidth=2.0)
    values = np.random.default_rng(0).integers(0, 100, (workers, workers, 3))  # a chunk of 3 bytes for each worker
    held, clock, sent = values.copy(), 0.0, 0
    for step in range(2 * (workers - 1)):
        moving = [(rank, (rank - step) % workers) for rank in range(workers)]
        chunks = [held[rank, chunk].copy() for rank, chunk in moving]
        for (rank, chunk), data in zip(moving, chunks, strict=True):
            right = (rank + 1) % workers
            held[right, chunk] = data + (held[right, chunk] if step < workers - 1 else 0)
        clock += link.seconds(3)
        sent += 3
    assert (held == values.sum(0)).all()
    assert clock == pytest.approx(ring_seconds(link, 3 * workers, workers))
    assert sent == pytest.approx(ring_bytes(3 * workers, workers))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 9, 1000, 1024, 1025])
def test_a_tree_played_out_reaches_everybody_in_its_time(workers: int) -> None:
    link = Link(latency=0.5, bandwidth=2.0)
    reached, rounds = 1, 0
    while reached < workers:  # everybody who has it tells one more
        reached, rounds = 2 * reached, rounds + 1
    assert tree_seconds(link, 3, workers) == pytest.approx(2 * rounds * link.seconds(3))


@pytest.mark.parametrize("workers", [1, 2, 3, 10])
def test_a_server_played_out_takes_in_and_gives_out_one_after_the_other(workers: int) -> None:
    link = Link(latency=0.5, bandwidth=2.0)
    arrived = [link.latency + 3 / link.bandwidth * (place + 1) for place in range(workers - 1)]
    pulled = [max(arrived) + link.latency + 3 / link.bandwidth * (place + 1) for place in range(workers - 1)] or [0]
    assert max(pulled) == pytest.approx(server_seconds(link, 3, workers)) if workers > 1 else max(pulled) == 0
    assert server_bytes(3, workers) == 2 * 3 * (workers - 1)


@given(link=real_links, workers=st.integers(3, 10_000), nbytes=st.floats(1, 1e12))
def test_a_ring_beats_a_server_exactly_above_the_crossing(link: Link, workers: int, nbytes: float) -> None:
    crossing = workers * (workers - 2) / (workers - 1) ** 2 * link.latency * link.bandwidth
    ring, server = ring_seconds(link, nbytes, workers), server_seconds(link, nbytes, workers)
    if not math.isclose(nbytes, crossing, rel_tol=1e-6):
        assert (ring < server) == (nbytes > crossing)


@given(link=real_links, workers=st.integers(2, 10_000), nbytes=st.floats(0, 1e12))
def test_laws_of_all_costs(link: Link, workers: int, nbytes: float) -> None:
    assert ring_bytes(nbytes, workers) * workers == pytest.approx(server_bytes(nbytes, workers))
    assert ring_bytes(nbytes, workers) <= 2 * nbytes
    faster = Link(latency=link.latency / 2, bandwidth=link.bandwidth * 2)
    for seconds in (server_seconds, ring_seconds, tree_seconds):
        assert seconds(link, nbytes, 1) == 0
        assert seconds(link, nbytes, workers) <= seconds(link, nbytes, workers + 1)
        assert seconds(link, nbytes, workers) <= seconds(link, 2 * nbytes, workers)
        assert seconds(faster, nbytes, workers) == pytest.approx(seconds(link, nbytes, workers) / 2)


@given(link=real_links, hosts=st.integers(1, 50), host_workers=st.integers(1, 16), nbytes=st.floats(0, 1e12))
def test_two_levels(link: Link, hosts: int, host_workers: int, nbytes: float) -> None:
    flat = ring_seconds(link, nbytes, hosts * host_workers)
    free = Link()
    assert two_level_seconds(free, link, nbytes, hosts, host_workers) == ring_seconds(link, nbytes, hosts)
    assert two_level_seconds(free, link, nbytes, hosts, host_workers) <= flat * (1 + 1e-12)
    assert two_level_seconds(link, link, nbytes, hosts, 1) == ring_seconds(link, nbytes, hosts)
    assert two_level_seconds(link, link, nbytes, 1, host_workers) == ring_seconds(link, nbytes, host_workers)


# Overlap --------------------------------------------------------------------------------------------------


def test_buckets_are_exchanged_in_order_while_backward_goes_on() -> None:
    assert exchange_end([1, 2, 10], [3, 3, 3]) == 13
    assert exchange_end([1, 2, 3], [3, 3, 3]) == 10
    assert exposed_seconds(10, [1, 2, 10], [3, 3, 3]) == 3
    assert exposed_seconds(20, [1, 2, 10], [3, 3, 3]) == 0
    assert exchange_end([], []) == 0
    with pytest.raises(UsageError, match="2 times and 1 costs"):
        exchange_end([1, 2], [1])


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1))
def test_overlap_never_costs_and_never_hides_the_last_bucket(buckets: list[tuple[float, float]]) -> None:
    ready, costs = sorted(time for time, _ in buckets), [cost for _, cost in buckets]
    backward = ready[-1]
    exposed = exposed_seconds(backward, ready, costs)
    assert costs[-1] <= exposed + 1e-9
    assert exposed <= sum(costs) + 1e-9
