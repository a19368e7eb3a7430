"""Partition of attention heads, and the exchange of features, for ranks that do not divide them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.heads import partition_heads
from fused_tp.nn.feature_exchange import FeatureExchange, chunks
from tests.workers import on_ranks


@pytest.mark.parametrize("num_heads", [1, 3, 5, 8, 12, 28])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7, 12])
@pytest.mark.parametrize("keeps_groups", [False, True])
def test_partition(num_heads: int, num_ranks: int, keeps_groups: bool) -> None:
    for num_kv_heads in (n for n in range(1, num_heads + 1) if num_heads % n == 0):
        if num_ranks > (num_kv_heads if keeps_groups else num_heads):
            with pytest.raises(ValueError, match="ranks can share"):
                partition_heads(num_heads, num_kv_heads, num_ranks, keeps_groups=keeps_groups)
            continue
        partition = partition_heads(num_heads, num_kv_heads, num_ranks, keeps_groups=keeps_groups)
        assert partition[0].start == 0 and partition[-1].stop == num_heads and len(partition) == num_ranks
        assert all(before.stop == after.start for before, after in pairwise(partition))
        group_size = num_heads // num_kv_heads
        for heads in partition:
            read = [head for head in heads.kv_heads for _ in range(heads.group_size)]
            assert read == [head // group_size for head in range(heads.start, heads.stop)] != []
            assert not keeps_groups or heads.group_size == group_size
        largest = max(heads.num_heads + len(heads.kv_heads) for heads in partition)
        if num_heads % num_ranks == 0 and num_kv_heads % num_ranks == 0:
            assert largest == (num_heads + num_kv_heads) // num_ranks


@on_ranks(3)
def test_exchange(group: dist.ProcessGroup) -> None:
    """Exchange features of which one is needed twice, one by nobody, and of which one rank needs none of its own."""
    mesh, rank = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), dist.get_rank(group)
    needed = (((0, 3), (6, 7)), ((0, 2),), ((3, 6), (3, 4)))
    exchange = FeatureExchange(chunks(8, 3), needed)
    full = torch.arange(16.0).view(2, 8)
    x = full[:, 3 * rank : min(3 * rank + 3, 8)].clone().requires_grad_()
    y = exchange(x, mesh)
    assert torch.equal(y, torch.cat([full[:, start:stop] for start, stop in needed[rank]], 1))
    y.sum().backward()
    counts = torch.zeros(8)
    for (start, stop), _ in product((range_ for ranges in needed for range_ in ranges), (0,)):
        counts[start:stop] += 1
    assert x.grad is not None and torch.equal(x.grad, counts[3 * rank : 3 * rank + 3].expand(2, -1))
    assert exchange.num_gathered_features == 9
    assert exchange(torch.zeros(8)[3 * rank : 3 * rank + 3], mesh).shape == y.shape[1:]
    unchanged = FeatureExchange(chunks(8, 3), chunks(8, 3))
    assert unchanged(x, mesh) is x
