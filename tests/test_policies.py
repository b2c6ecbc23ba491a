"""Laws that hold for every policy: a new policy joins by one line in ALL_POLICIES."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import paceline.policies
from paceline.errors import UsageError
from paceline.policies import (
    EASGD,
    POLICIES,
    SMA,
    SSP,
    AdaComm,
    AdaSync,
    AllReduce,
    Async,
    Atomic,
    Average,
    Cyclades,
    DiLoCo,
    Downpour,
    Draco,
    Gossip,
    GradientCoding,
    Hogwild,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    LocalSGD,
    Locked,
    PeersPolicy,
    Policy,
    PostLocalSGD,
    RoundRobin,
    Serial,
    Sync,
    SyncEASGD,
    parse_policy,
)

ALL_POLICIES: list[Policy] = [
    AllReduce(),
    AllReduce(bucket_cap_mb=0, first_bucket_mb=0.25, overlap=False),
    LocalSGD(every=1),
    DiLoCo(every=500),
    DiLoCo(every=9, outer_lr=0.4, outer_momentum=0.0, fragments=3, overlap=8, merge=0.0),
    AdaComm(every=16),
    AdaComm(every=1, window=1),
    SyncEASGD(),
    SMA(),
    SMA(alpha=0.1, momentum=0.0, every=4, learners="auto"),
    Gossip(),
    Gossip(topology="random-pairs", seed=3),
    PostLocalSGD(every=16),
    PostLocalSGD(every=2, start=0),
    PostLocalSGD(every=2, start="epoch-150"),
    Sync(),
    Async(),
    KSync(k=3),
    KBatchSync(k=1),
    KAsync(k=100),
    KBatchAsync(k=7),
    SSP(bound=0),
    Downpour(period=4),
    GradientCoding(stragglers=2),
    EASGD(period=10, alpha=0.1),
    EASGD(period=1, alpha=0.5, order="round-robin", momentum=0.99),
    Draco(faulty=1),
    AdaSync(),
    AdaSync(k0=2, over="k-batch-async", rule="root", window=0.5),
    Serial(),
    Hogwild(threads=2),
    Atomic(threads=2),
    Locked(),
    RoundRobin(threads=2),
    Average(threads=3),
    Cyclades(threads=2, batch=100),
]
FILES = sorted(Path(paceline.policies.__file__).parent.rglob("*.py"))
NOT_PURE = {"torch", "socket", "time", "random", "numpy", "threading", "os"}
OURS = ("paceline.errors", "paceline.spec", "paceline.policies")

every_policy = pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)


def test_the_table_of_this_suite_has_every_policy() -> None:
    assert {type(policy) for policy in ALL_POLICIES} == set(POLICIES.values())
    assert all(POLICIES[policy.name] is type(policy) for policy in ALL_POLICIES)


@every_policy
def test_text_reads_back(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy
    assert str(parse_policy(str(policy))) == str(policy)


@every_policy
def test_a_policy_passes_through_the_parser(policy: Policy) -> None:
    assert parse_policy(policy) is policy


@every_policy
def test_equal_by_value(policy: Policy) -> None:
    twin = dataclasses.replace(policy)
    assert twin is not policy
    assert twin == policy
    assert hash(twin) == hash(policy)
    assert repr(twin).startswith(f"{type(policy).__name__}(")


@every_policy
def test_frozen(policy: Policy) -> None:
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, getattr(policy, field.name))


@every_policy
def test_options_are_given_by_name(policy: Policy) -> None:
    assert all(field.kw_only for field in dataclasses.fields(policy))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_policies_only_decide(file: Path) -> None:
    for module in imported(file):
        assert module.split(".")[0] not in NOT_PURE
        assert not module.startswith("paceline") or module.startswith(OURS)


def test_imports_are_found_wherever_they_hide(tmp_path: Path) -> None:
    file = tmp_path / "policy.py"
    file.write_text("import os.path\ndef f():\n    from torch import nn\n    from . import base\n")
    assert imported(file) == {"os.path", "torch", "paceline.policies"}


def imported(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add("paceline.policies" if node.level == 1 else node.module or "..")
    return modules


def test_all_reduce_by_default() -> None:
    assert str(AllReduce()) == "all-reduce"
    assert repr(AllReduce()) == "AllReduce(bucket_cap_mb=25.0, first_bucket_mb=1.0, overlap=True)"
    assert isinstance(AllReduce(), PeersPolicy)
    assert str(AllReduce(bucket_cap_mb=10, overlap=False)) == "all-reduce(bucket_cap_mb=10.0, overlap=false)"


@pytest.mark.parametrize("size", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("option", ["bucket_cap_mb", "first_bucket_mb"])
def test_all_reduce_refuses_impossible_sizes(option: str, size: float) -> None:
    with pytest.raises(UsageError, match=f"{option} must be finite and at least 0, got {size}"):
        parse_policy(f"all-reduce({option}={size})")


def test_wrong_types_are_refused_from_python_too() -> None:
    size: Any = "25"
    with pytest.raises(UsageError, match="bucket_cap_mb wants a number, got '25'"):
        AllReduce(bucket_cap_mb=size)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no policy called 'all_reduce'\. Did you mean 'all-reduce'"):
        parse_policy("all_reduce")
    with pytest.raises(UsageError, match=r"has no option 'bucket-cap-mb'\. Did you mean 'bucket_cap_mb'"):
        parse_policy("all-reduce(bucket-cap-mb=3)")


@pytest.mark.parametrize("wrong", [None, AllReduce, 3])
def test_other_things_than_policies_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="wanted a policy or its text form"):
        parse_policy(wrong)


@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
def test_a_commit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"k must be at least 1, got 0; for example {name}\(k=3\)"):
        parse_policy(f"{name}(k=0)")
    with pytest.raises(UsageError, match="needs the option k"):
        parse_policy(name)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ssp(bound=-1)", "bound must be at least 0, got -1"),
        ("easgd(period=0, alpha=0.1)", "period must be at least 1, got 0"),
        ("easgd(period=1, alpha=0)", "alpha must be above 0 and below 1, got 0"),
        ("easgd(period=1, alpha=1)", "alpha must be above 0 and below 1, got 1"),
        ("easgd(period=1, alpha=nan)", "alpha must be above 0 and below 1, got nan"),
        ("easgd(period=1, alpha=0.1, weights=staleness)", "alpha is the weight of every exchange"),
        ("easgd(period=1, alpha=0.1, momentum=1)", "momentum must be at least 0 and below 1, got 1"),
        ("easgd(period=1, alpha=0.1, order=last-come)", "order wants one of first-come, round-robin"),
        ("gossip(topology=star)", "topology wants one of ring, exponential, random-pairs"),
        ("sync-easgd(alpha=0)", "alpha must be above 0 and at most 1, got 0"),
        ("sma(alpha=1.5)", "alpha must be above 0 and at most 1, got 1.5"),
        ("sma(momentum=1)", "momentum must be at least 0 and below 1, got 1.0"),
        ("sma(every=0)", "every must be at least 1, got 0"),
        ("sma(learners=0)", "learners must be at least 1, got 0"),
        ("sma(learners=many)", "learners wants a whole number or one of auto"),
        ("ada-sync(k0=0)", "k0 must be above 0 and finite, got 0"),
        ("ada-sync(k0=inf)", "k0 must be above 0"),
        ("ada-sync(window=-1)", "window must be finite and at least 0"),
        ("ada-sync(window=inf)", "window must be finite and at least 0"),
        ("ada-sync(over=sync)", "over wants"),
        ("ada-sync(rule=cubic)", "rule wants"),
        ("hogwild(threads=-1)", "threads must be from 1 to 256, or 0 to choose, got -1"),
        ("locked(threads=257)", "threads must be from 1 to 256, or 0 to choose, got 257"),
        ("cyclades(batch=-1)", "batch must be from 1 to 1048576, or 0 to choose, got -1"),
    ],
)
def test_impossible_options_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_policy(text)
