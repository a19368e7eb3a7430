"""Two levels: ranks of one machine that emulate several hosts, with shared memory inside and gloo across."""

from __future__ import annotations

import inspect
import json
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.backends import registry
from fused_tp.backends.hierarchical import hierarchical
from fused_tp.backends.hierarchical import two_level as hosts_module
from fused_tp.backends.hierarchical.hierarchical import HierarchicalSchedule
from fused_tp.backends.hierarchical.two_level import Hosts, count_ranks_per_host, group_hosts, to_group_error
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.registry import select_schedule
from fused_tp.backends.shared_memory import shm
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import Group, resolve_group
from fused_tp.core.store import create_together
from fused_tp.ops import collectives
from tests.beside import beside
from tests.distributed.schedule_cases import every_method, movements, same_sum
from tests.distributed.test_tp_ops import all_cases
from tests.faults import NOTICE_SECONDS
from tests.late import give_up, wait_for_those_who_gave_up
from tests.workers import Outcome, fresh_ranks, on_ranks, run_fresh, run_ranks

pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")


@pytest.mark.parametrize(
    ("names", "answer"),
    [
        ("aabb", 2),
        ("aaabbb", 3),
        ("aabbcc", 2),
        ("aaaa", "all ranks of the group are on one host"),
        ("abcd", "each rank of the group is on a different host"),
        ("abab", "the group's 4 ranks are not in consecutive blocks of equal size on the 2 hosts"),
        ("aaab", "not in consecutive blocks"),
        ("aabbb", "not in consecutive blocks"),
        ("aabbaa", "not in consecutive blocks"),
    ],
)
def test_hosts_have_equally_many_ranks_side_by_side(names: str, answer: int | str) -> None:
    found = count_ranks_per_host(list(names))
    assert found == answer if isinstance(answer, int) else answer in str(found)


FORCED = {"FUSED_TP_SCHEDULE": "hierarchical"}


@contextmanager
def on_hosts(names: str, **env: str) -> Iterator[Any]:
    """Create a group of the first ranks, on hosts with these names; all ranks of the world call it."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_TP_HOST", names[rank] if rank < len(names) else "none")
        for name, value in env.items():
            patch.setenv(name, value)
        yield dist.new_group(list(range(len(names))))


def all_ops(_: Any, names: str, dtype: torch.dtype, chunk_bytes: int) -> list[str]:
    with on_hosts(names) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchical, "CHUNK_BYTES", chunk_bytes)
        if dist.get_rank() >= len(names):
            return []
        world = len(names)
        made = select_schedule(ScheduleKey("all_reduce", dtype, torch.device("cpu"), 3, None, 4), resolve_group(group))
        assert isinstance(made, HierarchicalSchedule)
        assert made._host_schedule("matmul_reduce_scatter", dtype).name == "one_sided"
        every_method(made, dtype, exact=False)  # unequal shards fall back to one level, with right results
        all_cases(group, str(dtype).removeprefix("torch."), strided=False)
        integers(made)
        patch.setenv("FUSED_TP_SHM", "0")  # a later change also affects the inner schedule
        assert made._host_schedule("matmul_reduce_scatter", dtype).name == "plain"
        movements(made, partial(same_sum, made, False), dtype, 1, 2 * world, 1, 3)
        patch.delenv("FUSED_TP_SHM")
        assert made._host_schedule("matmul_reduce_scatter", dtype).name == "one_sided"
        explained = str(fused_tp.explain("matmul_all_reduce", (4, 8), (6, 8), dtype=dtype, group=group))
        hosts = group_hosts(resolve_group(group))
        assert isinstance(hosts, Hosts)
        return [explained, str(hosts.local_group.ranks), str(hosts.cross_group.ranks)]


def integers(made: HierarchicalSchedule) -> None:
    whole = torch.arange(12 * made.world_size).view(3, 4 * made.world_size)
    shard = whole.chunk(made.world_size, 1)[made.rank]
    assert torch.equal(made.all_gather(shard, gather_dim=1, gather_size=None).wait(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_bytes", [32, 1 << 20])
def test_two_hosts_of_two_ranks(dtype: torch.dtype, chunk_bytes: int) -> None:
    answers = run_ranks(4, all_ops, "aabb", dtype, chunk_bytes, env=FORCED)
    assert [answer[1:] for answer in answers] == [
        ["(0, 1)", "(0, 2)"],
        ["(0, 1)", "(1, 3)"],
        ["(2, 3)", "(0, 2)"],
        ["(2, 3)", "(1, 3)"],
    ]
    assert "hierarchical over memory inside hosts, messages across" in answers[0][0]


def count_bytes(_: Any) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """Messages of torch.distributed from this rank by op: ranks of the group, and total bytes."""
    sent: list[tuple[tuple[int, ...], int]] = []

    def counted(name: str, nbytes: Callable[..., int]) -> Any:
        move = getattr(TorchDist, name)

        def instead(self: TorchDist, op: str, x: Tensor, *args: Any) -> Any:
            sent.append((self.group.ranks, nbytes(self, x, *args)))
            return move(self, op, x, *args)

        return instead

    with on_hosts("aabb") as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchDist, "all_gather", counted("all_gather", lambda t, x: x.nbytes * (t.world_size - 1)))
        patch.setattr(TorchDist, "shift", counted("shift", lambda t, x, out, step: x.nbytes))
        patch.setattr(
            TorchDist,
            "all_to_all",
            counted("all_to_all", lambda t, x, sizes, _: x.nbytes // len(x) * (len(x) - sizes[t.rank])),
        )
        shard, partial, w = torch.ones(4, 10), torch.ones(16, 10), torch.ones(6, 10)
        ops: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: collectives.all_gather(shard, 0, group=group),
            "all_gather_matmul": lambda: fused_tp.all_gather_matmul(shard, w, group=group),
            "reduce_scatter": lambda: collectives.reduce_scatter(partial, 0, group=group),
            "matmul_reduce_scatter": lambda: fused_tp.matmul_reduce_scatter(partial, w, group=group),
            "all_reduce": lambda: collectives.all_reduce(partial, group=group),
            "matmul_all_reduce": lambda: fused_tp.matmul_all_reduce(partial, w, group=group),
        }
        found = {}
        for name, op in ops.items():
            op()
            found[name] = [(ranks, sum(n for where, n in sent if where == ranks)) for ranks in {r for r, _ in sent}]
            sent.clear()
        return found


def test_what_leaves_a_host_is_what_no_other_rank_of_it_sends() -> None:
    """A flat exchange would send everything to both ranks of the other host: twice as much."""
    for rank, found in enumerate(run_ranks(4, count_bytes, env=FORCED)):
        across = (rank % 2, rank % 2 + 2)
        assert found == {
            "all_gather": [(across, 4 * 10 * 4)],
            "all_gather_matmul": [(across, 4 * 10 * 4)],
            "reduce_scatter": [(across, 4 * 10 * 4)],
            "matmul_reduce_scatter": [(across, 4 * 6 * 4)],
            "all_reduce": [(across, 16 // 2 * 10 * 4)],
            "matmul_all_reduce": [(across, 16 // 2 * 6 * 4)],
        }


@pytest.mark.full
@on_ranks(6, run=run_fresh, env=FORCED)
def test_three_hosts_of_two_ranks_and_two_of_them(_: Any) -> None:
    all_ops(_, "aabbcc", torch.float32, 64)
    others = [dist.new_group(list(range(6))) for _ in range(2)]
    x = torch.ones(3)
    with on_hosts("aabb") as group:  # a subset of the world; the other ranks do not know its hosts
        if dist.get_rank() < 4:
            assert torch.equal(fused_tp.all_reduce(x, group=group), 4 * x)
            hosts = group_hosts(resolve_group(group))
            assert isinstance(hosts, Hosts)
            parts = [hosts.local_group, hosts.cross_group]
    for gone in (*others, group):
        if gone is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(gone)
    with on_hosts("aabb") as group:  # its subgroups must not reuse the names of the destroyed ones
        if dist.get_rank() < 4:
            assert torch.equal(fused_tp.all_reduce(x, group=group), 4 * x)
            assert not any(part.process_group in dist.distributed_c10d._world.pg_map for part in parts)
    dist.barrier()


def explained(_: Any, names: str, without_shared_memory: str = "") -> str:
    core = None if str(dist.get_rank()) in without_shared_memory else shm._core
    no_core = mock.patch.multiple(shm, _core=core, _core_missing_reason="there is no native core (for this test)")
    with no_core, on_hosts(names) as group:
        return explanation(group)


def explanation(group: Any) -> str:
    y = fused_tp.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)
    assert torch.equal(y, torch.full((2, 4), 12.0))
    return str(fused_tp.explain("matmul_all_reduce", (2, 3), (4, 3), dtype=torch.float32, group=group))


@pytest.mark.parametrize(
    ("names", "without_shared_memory", "taken", "why"),
    [
        ("aaaa", "", "one_sided", "but all ranks of the group are on one host"),
        ("abcd", "", "plain", "each rank of the group is on a different host"),
        ("abab", "", "plain", "consecutive blocks"),
        ("aabb", "23", "plain", "no fast links inside a host"),  # one host lacks them, so no host uses them
        ("aabb", "", "hierarchical", "forces it"),
    ],
)
def test_groups_without_two_levels_go_by_the_table(
    names: str, without_shared_memory: str, taken: str, why: str
) -> None:
    for said in run_ranks(4, explained, names, without_shared_memory, env=FORCED):
        assert f"forward: {taken} over" in said and why in said, said


@on_ranks(4)
def test_ranks_of_several_hosts_take_two_levels_by_themselves(world: Any) -> None:
    assert "forward: hierarchical over" in (said := explained(world, "aabb")) and "several hosts" in said
    said = explained(world, "abab")
    assert (
        "forward: plain over gloo" in said
        and "no shared memory: FUSED_TP_HOST assigns the group's ranks to 2 different hosts" in said
    )


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="torch before 2.13 sorts a group's ranks"
)
@on_ranks(4, env=FORCED)
def test_ranks_in_an_order_that_torch_would_not_keep_go_by_the_table(_: Any) -> None:
    with on_hosts("bbaa"):
        assert "the group's ranks [2, 3, 0, 1] do not ascend" in explanation(
            dist.new_group([2, 3, 0, 1], sort_ranks=False)
        )


# ---- failures ----------------------------------------------------------------------------------------------------


def parts_that_rank_3_does_not_make() -> str:
    def never(*_: Any) -> None:
        wait_for_those_who_gave_up("parts", (0, 1, 2))
        raise fused_tp.FusedTPError("it is late")

    with on_hosts("aabb", FUSED_TP_TIMEOUT="0.5") as group, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 3:
            patch.setattr(hosts_module, "_create_subgroup", never)
        with pytest.raises(fused_tp.FusedTPError) as first:
            fused_tp.all_reduce(torch.ones(3), group=group)
        give_up("parts")
        begun = time.monotonic()
        with pytest.raises(type(first.value), match="is unusable since its first call failed"):
            fused_tp.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - begun < 0.5
        return f"{type(first.value).__name__}: {first.value}"


def memory_that_rank_3_does_not_join() -> tuple[str, str, float]:
    """The group's name, and its error if rank 3 does not join the shared memory of rank 2's host."""
    with on_hosts("aabb", FUSED_TP_TIMEOUT="1") as group:
        described = resolve_group(group)
        assert create_together(registry._DIFFERING_SETTINGS, described, registry._compare_settings) == ""
        assert isinstance(hosts_module.group_hosts(described), hosts_module.Hosts)
        begun = time.monotonic()
        if dist.get_rank() == 3:
            return group.group_name, "", 0.0
        with pytest.raises(fused_tp.CollectiveTimeoutError) as first:
            fused_tp.all_reduce(torch.ones(3), group=group)
        return group.group_name, str(first.value), time.monotonic() - begun


def failing_one_after_the_other(_: Any) -> tuple[Any, ...]:
    found = []
    for case in (parts_that_rank_3_does_not_make, memory_that_rank_3_does_not_join):
        found.append(case())
        dist.barrier()
        # torch numbers groups: after a failed creation, the ranks must still agree on the next number.
        everyone = torch.ones(1)
        dist.all_reduce(everyone, group=dist.new_group(list(range(4))))
        assert everyone.item() == 4.0
    return tuple(found)


@beside(lambda: fresh_ranks(4, failing_one_after_the_other, env=FORCED, expect_deaths=True))
def test_rank_that_does_not_join_a_level_ends_group_on_all_ranks(outcome: list[Outcome]) -> None:
    outcomes = [one.unwrap() for one in outcome]
    for rank, (parts, memory) in enumerate(outcomes[:3]):
        assert parts.startswith("CollectiveTimeoutError: ")
        assert "did not take part within 0.5 s (FUSED_TP_TIMEOUT)" in parts
        name, said, seconds = memory
        # If ranks 0 and 1 start late, their own deadline may pass first.
        if rank == 2 or "fast links inside hosts" not in said:
            sentence = f"Rank 3 did not take part in the shared-memory rendezvous of group {name!r} within 1 s"
            assert sentence in said and "This is rank 2." in said, said
        assert seconds < 1.0 + NOTICE_SECONDS, said
    assert "some rank of [2, 3]" in outcomes[2][0]


def test_errors_of_a_level_are_told_of_the_group() -> None:
    group = Group(None, "user's", 5, 6, (0, 1, 4, 5, 8, 9))
    level = Group(None, "2f9a", 2, 3, (1, 5, 9))
    where = {"op": "x", "call": 2, "group": "2f9a", "rank": 1, "size": 3}
    sentence = "{op} (call {call} of group {group!r}) on rank {rank} of {size} "
    late = fused_tp.CollectiveTimeoutError(
        sentence + "waited 3 s for {missing}.", missing={1: "last heard of at call 2, y", 2: ""}, **where
    )
    follows = fused_tp.PeerLostError(": rank {cause.rank} has failed. It said: {cause}", cause=late, **where)
    told = 'x (call 2 of group "user\'s") on rank 3 of 6 waited 3 s for ranks 3 (last heard of at call 2, y) and 5.'
    assert str(to_group_error(late, level, group)) == told
    assert str(to_group_error(follows, level, group)) == f": rank 3 has failed. It said: {told}"
    native = to_group_error(fused_tp.PeerLostError("{rank} died"), level, group)
    assert str(native) == '{rank} died (Its ranks are ranks 1, 3 and 5 of group "user\'s".)'
    for error in (late, follows, native):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert str(FusedTPError.from_dict(json.loads(json.dumps(error.as_dict())))) == str(error)
