"""DistributedBatches: samples of each rank, also at another number of ranks and after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fused_tp
from fused_tp import DistributedBatches
from tests.workers import error_of, on_ranks, run_ranks

SAMPLES = 23


class Numbers(Dataset[int]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 100 + index


class Stream(IterableDataset[int]):
    """Dataset that distributes its samples over workers itself, as those of `datasets` do, and saves its position."""

    def __init__(self) -> None:
        self.epoch, self.at, self.begin, self.read = 0, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        begin, self.begin = self.begin, 0
        for index in range(begin + first, SAMPLES, every):
            self.read += 1
            self.at = index + 1
            yield 1000 * self.epoch + index

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def mesh_of(group: dist.ProcessGroup, dp: int) -> DeviceMesh:
    """Mesh of `dp` ranks with batches of their own, times the ranks that share each batch."""
    if group.size() < 4:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard" if dp > 1 else "tp",))
    return DeviceMesh("cpu", torch.arange(4).view(dp, -1), mesh_dim_names=("dp_shard", "tp"))


def take(
    group: dist.ProcessGroup, dp: int, kind: str, state: Any, count: int | None, size: int, keywords: dict[str, Any]
) -> tuple[list[list[int]], Any]:
    """The next batches of this rank, and the position after them."""
    dataset = Numbers() if kind == "map" else Stream()
    keywords = {"shuffle": kind == "map", **keywords}
    batches = DistributedBatches(dataset, mesh_of(group, dp), size, epochs=3, seed=7, **keywords)
    if state is not None:
        batches.load_state_dict(state)
    found = [batch.tolist() for batch in islice(batches, count)]
    assert all(len(batch) <= batches.batch_size == size // dp for batch in found)
    return found, batches.state_dict()


def global_batches(ranks: list[tuple[list[list[int]], Any]], dp: int) -> list[list[int]]:
    """Global batches from all ranks; ranks that share a batch must have received equal ones."""
    share = len(ranks) // dp
    assert len({str(state) for _, state in ranks}) == 1
    for rank, (batches, _) in enumerate(ranks):
        assert batches == ranks[rank // share * share][0]
    return [[*chain(*parts)] for parts in zip(*(ranks[i * share][0] for i in range(dp)), strict=True)]


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        ("map", {}),
        ("stream", {"dataset_state": True}),
        pytest.param("stream", {}, marks=pytest.mark.full),
        pytest.param("map", {"num_workers": 2}, marks=pytest.mark.full),
        pytest.param("stream", {"num_workers": 2}, marks=pytest.mark.full),
        ("stream", {"num_workers": 2, "dataset_state": True}),
    ],
)
def test_the_same_samples_at_any_number_of_ranks(kind: str, keywords: dict[str, Any]) -> None:
    wanted = take_alone(kind)
    per_epoch = SAMPLES // 4
    assert len(wanted) == 3 * per_epoch
    for epoch in range(3):
        flat = [*chain(*wanted[epoch * per_epoch : (epoch + 1) * per_epoch])]
        assert len(set(flat)) == len(flat) == per_epoch * 4
    assert kind == "stream" or sorted(wanted[0]) != wanted[0] != wanted[per_epoch]
    found: list[list[int]] = []
    state = None
    # In the middle of epochs, at the end of one (5 batches each), and at another number of workers.
    for world, dp, count, workers in ((2, 1, 3, 0), (4, 2, 2, 2), (4, 4, 4, 0), (4, 1, 3, 2), (2, 2, None, 0)):
        more = {**keywords, "num_workers": workers} if keywords.get("num_workers") else keywords
        ranks = run_ranks(world, take, dp, kind, state, count, 4, more)
        state = ranks[0][1]
        found += global_batches(ranks, dp)
    assert found == wanted


def take_alone(kind: str) -> list[list[int]]:
    dataset = Numbers() if kind == "map" else Stream()
    batches = DistributedBatches(dataset, None, 4, epochs=3, seed=7, shuffle=kind == "map")
    return [batch.tolist() for batch in batches]


def test_another_global_batch_size_and_the_rest_of_an_epoch() -> None:
    for kind in ("map", "stream"):
        (first, state), *_ = run_ranks(2, take, 1, kind, None, 3, 4, {})
        ranks = run_ranks(4, take, 2, kind, state, None, 6, {})
        then = global_batches(ranks, 2)
        whole = [*chain(*take_alone(kind))]
        assert [*chain(*first)] + then[0] == whole[:18]  # 12 samples consumed, 11 left: one batch of 6
        assert [len(batch) for batch in then] == [6] + 2 * [6] * 3
        # Without drop_last the last batch of 22 samples is shorter.
        batches = DistributedBatches(list(range(22)), None, 4, drop_last=False)
        assert [len(batch) for batch in batches] == [4] * 5 + [2]


def test_a_stream_with_a_state_is_not_read_again() -> None:
    for dataset_state, read in ((False, 16), (True, 4)):
        batches = DistributedBatches(Stream(), None, 4, dataset_state=dataset_state)
        list(islice(batches, 3))
        again = Stream()
        resumed = DistributedBatches(again, None, 4, dataset_state=dataset_state)
        resumed.load_state_dict(batches.state_dict())
        assert next(iter(resumed)).tolist() == [12, 13, 14, 15] and again.read == read


def test_iterating_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(DistributedBatches(Numbers(), None, 4, shuffle=True, epochs=2))
    assert torch.equal(before, torch.get_rng_state())


@on_ranks(4)
def test_dims_with_batches_of_their_own(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    numbers = list(range(8))
    for sizes, own in (
        ({"pp": 2, "cp": 2}, [0, 0, 0, 0]),
        ({"dp_replicate": 2, "dp_shard": 2}, [0, 1, 2, 3]),
        ({"dp_replicate": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"dp_shard": 2, "ep": 2}, [0, 1, 2, 3]),
        ({"pp": 2, "dp_shard": 2}, [0, 1, 0, 1]),
    ):
        mesh = fused_tp.make_mesh("cpu", **sizes)
        share = 8 // (max(own) + 1)
        (batch,) = DistributedBatches(numbers, mesh, 8)
        assert batch.tolist() == numbers[own[rank] * share :][:share], sizes
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replica", "model"))
    (batch,) = DistributedBatches(numbers, mesh, 8, dp_dims=["replica"])
    assert batch.tolist() == numbers[rank // 2 * 4 :][:4]


@on_ranks(4)
def test_what_is_refused(group: dist.ProcessGroup) -> None:
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)
    unequal = Numbers(SAMPLES + (rank == 3))
    error = error_of(DistributedBatches, unequal, mesh, 4)
    assert isinstance(error, fused_tp.RankMismatchError) and "length of the dataset: 23, 23, 23, 24" in str(error)
    error = error_of(DistributedBatches, Numbers(), mesh, 4, seed=rank % 2)
    assert isinstance(error, fused_tp.RankMismatchError) and "differ in seed" in str(error)
    made = DistributedBatches(Numbers(), mesh, 4, shuffle=True)
    whole = made.state_dict()
    for says, fn, args, keywords in (
        ("must be a multiple of the 2 data", DistributedBatches, (Numbers(), mesh, 5), {}),
        ("global_batch_size is 0", DistributedBatches, (Numbers(), mesh, 0), {}),
        ("fewer than global_batch_size=24", DistributedBatches, (Numbers(), mesh, 24), {}),
        (
            "has 3 samples, which is not a multiple of the 2 data",
            DistributedBatches,
            (Numbers(), mesh, 4),
            {"drop_last": False},
        ),
        ("needs a map-style dataset", DistributedBatches, (Stream(), mesh, 4), {"shuffle": True}),
        ("needs an iterable dataset", DistributedBatches, (Numbers(), mesh, 4), {"dataset_state": True}),
        ("does not support 'sampler'", DistributedBatches, (Numbers(), mesh, 4), {"sampler": None}),
        ("has neither", DistributedBatches, (4, mesh, 4), {}),
        ("must be a DeviceMesh or None", DistributedBatches, (Numbers(), "cpu", 4), {}),
        ("dp_dims must be dims of mesh", DistributedBatches, (Numbers(), mesh, 4), {"dp_dims": ["dp"]}),
        ("seed=1, got seed=0", made.load_state_dict, ({**whole, "seed": 1},), {}),
        ("length=9, got length=23", made.load_state_dict, ({**whole, "length": 9},), {}),
    ):
        error = error_of(fn, *args, **keywords)
        assert isinstance(error, (ValueError, TypeError)) and says in str(error), (says, error)
    uneven = DistributedBatches(Stream(), mesh, 4, drop_last=False)
    assert "the last batch of an epoch has 3 samples" in str(error_of(list, uneven))
    uneven.load_state_dict({**uneven.state_dict(), "samples": 24})
    assert "yielded only 23 samples" in str(error_of(list, uneven))
    iterator = iter(made)
    next(iterator)
    made.load_state_dict(whole)
    assert "moved the position" in str(error_of(next, iterator))
