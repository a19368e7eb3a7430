"""Gradients over the context parallel ranks are sums, for every reader and at every time."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fused_tp.core.errors import RankMismatchError
from fused_tp.parallelizing.grad_sync import GradientSync
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import assert_same_gradients, copy_of, make, make_tokens, mesh_of
from tests.workers import on_ranks


class Mixed(nn.Module):
    """Model with parameters of two dtypes, used once, twice, tied or never, depending on `how`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.first, self.second, self.unused = (nn.Linear(6, 6) for _ in range(3))
        self.brief = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 6))

    def forward(self, tokens: Tensor, how: str = "") -> Tensor:
        x = self.embed(tokens)
        y = F.gelu(self.first(x))
        if "branches" in how:
            y = self.first(y) + self.second(y)
        if "reentrant" in how:
            for _ in range(2):
                y = checkpoint(lambda y: F.gelu(self.second(y)) * self.scale, y, use_reentrant=True)
        y = y + self.brief(x.bfloat16()).float() + self.empty.sum()
        return (y * self.scale) @ self.embed.weight.t()


def tokens_of(rank: int) -> Tensor:
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(rank))


def gathered(group: dist.ProcessGroup, t: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(t) for _ in range(group.size())]
    dist.all_gather(everyone, t.contiguous(), group=group)
    return everyone


def assert_sums(group: dist.ProcessGroup, synced: nn.Module, alone: nn.Module, *, in_terms: bool = False) -> None:
    """Check that gradients of `synced` are the sums, in rank order and to the last bit, of the ranks' `alone`.

    `in_terms`: a rank's gradient was summed in several terms; rounding may differ, but equally on all ranks.
    """
    for (name, mine), theirs in zip(synced.named_parameters(), alone.parameters(), strict=True):
        grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        count = torch.tensor(float(theirs.grad is not None))
        dist.all_reduce(count, group=group)
        if count == 0:
            assert mine.grad is None, f"{name} has a gradient"
            continue
        terms = gathered(group, grad)
        total = terms[0].float()
        for term in terms[1:]:
            total = total + term.float()
        assert mine.grad is not None, f"{name} has no gradient"
        if in_terms:
            assert all(torch.equal(other, mine.grad) for other in gathered(group, mine.grad)), f"gradient of {name}"
            torch.testing.assert_close(mine.grad, total.to(grad.dtype), msg=f"gradient of {name}")
        else:
            assert torch.equal(mine.grad, total.to(grad.dtype)), f"gradient of {name}"


def step(model: nn.Module, sync: GradientSync | None, *inputs: Any) -> None:
    if sync is not None:
        sync.watch(model)
    output = model(*inputs)
    output.square().mean().backward()


def both_of(group: dist.ProcessGroup) -> tuple[int, Mixed, Mixed, GradientSync]:
    """Rank, a model with local gradients, a copy with summed gradients, and the GradientSync of the copy."""
    alone = Mixed()
    return group.rank(), alone, copy.deepcopy(alone), GradientSync(mesh_of(group, group.size(), 1))


@on_ranks(2, 3)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_sums(group: dist.ProcessGroup, shared_memory: str) -> None:
    for how in ("", "branches", "reentrant"):
        rank, alone, synced, sync = both_of(group)
        with mock.patch.dict(os.environ, FUSED_TP_SHM=shared_memory):
            step(synced, sync, tokens_of(rank), how)
            step(alone, None, tokens_of(rank), how)
        assert_sums(group, synced, alone, in_terms="reentrant" in how)


@on_ranks(2)
def test_what_was_there_is_not_summed_again(group: dist.ProcessGroup) -> None:
    synced, sync, expected = Mixed(), GradientSync(mesh_of(group, 2, 1)), Mixed()
    for number in range(3):
        alone = Mixed()
        for model in (synced, alone):
            model.second.requires_grad_(number != 1)  # frozen for a while
        step(synced, sync, tokens_of(10 * number + group.rank()), "branches")
        step(alone, None, tokens_of(10 * number + group.rank()), "branches")
        for total, term in zip(expected.parameters(), alone.parameters(), strict=True):
            if term.grad is not None:
                first, second = gathered(group, term.grad)
                both = (first.float() + second.float()).to(term.dtype)
                total.grad = both if total.grad is None else total.grad + both
    for (name, mine), theirs in zip(synced.named_parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name


@on_ranks(2)
def test_autograd_grad_gives_sums_and_leaves_grad_alone(group: dist.ProcessGroup) -> None:
    rank, _, synced, sync = both_of(group)
    step(synced, sync, tokens_of(rank))
    before = [None if p.grad is None else p.grad.clone() for p in synced.parameters()]
    sync.watch(synced)
    wanted = [synced.first.weight, synced.embed.weight]
    found = torch.autograd.grad(synced(tokens_of(rank)).square().mean(), wanted)
    for p, old in zip(synced.parameters(), before, strict=True):
        assert (p.grad is None) == (old is None)
        assert old is None or torch.equal(p.grad, old)
    for grad, p in zip(found, wanted, strict=True):
        assert torch.equal(grad, p.grad)


@on_ranks(2)
def test_hooks_find_sums_in_the_middle_of_backward_and_act_on_them(group: dist.ProcessGroup) -> None:
    rank, alone, synced, sync = both_of(group)
    seen: list[Tensor] = []

    def look(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    synced.first.weight.register_post_accumulate_grad_hook(look)
    step(synced, sync, tokens_of(rank))
    step(alone, None, tokens_of(rank))
    assert_sums(group, synced, alone)
    assert torch.equal(seen[0], synced.first.weight.grad)
    synced.zero_grad()
    synced.first.weight.register_hook(lambda grad: grad * 0)
    synced.embed.weight.register_hook(lambda grad: grad * 0.5)
    step(synced, sync, tokens_of(rank))
    assert synced.embed.weight.grad is not None
    synced.embed.weight.grad *= 2
    alone.first.weight.grad = torch.zeros_like(alone.first.weight)
    assert_sums(group, synced, alone)


@on_ranks(4)
def test_ddp_averages_the_sums(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 2, 2)  # its dim "tp" is used as data parallel
    whole = make("plain")
    parallel: Any = parallelize(copy_of(whole), mesh, tp_dim="none")
    batches = [make_tokens(2, 9), make_tokens(2, 9).flip(1)]
    wrapped = DistributedDataParallel(parallel, process_group=mesh["tp"].get_group())
    for _ in range(2):
        for batch in batches:
            (whole(batch, labels=batch).loss / 2).backward()
        mine = batches[mesh["tp"].get_local_rank()]
        wrapped(mine, labels=mine).loss.backward()
    assert_same_gradients(parallel, whole)


@on_ranks(2)
@pytest.mark.parametrize("zero", [True, False])
def test_a_backward_that_raised_leaves_no_rank_apart(group: dist.ProcessGroup, zero: bool) -> None:
    rank, alone, synced, sync = both_of(group)
    step(synced, sync, tokens_of(rank))
    step(alone, None, tokens_of(rank))
    handle = synced.embed.weight.register_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        step(synced, sync, tokens_of(rank))
    handle.remove()
    for p in synced.parameters():  # the failed backward added the same on all ranks
        if p.grad is not None:
            assert all(torch.equal(p.grad, other) for other in gathered(group, p.grad))
    if zero:
        synced.zero_grad()
        synced.first.requires_grad_(False)  # frozen for a while
        step(synced, sync, tokens_of(rank))
        synced.zero_grad()
        synced.first.requires_grad_(True)
        step(synced, sync, tokens_of(rank))
        assert_sums(group, synced, alone)


@on_ranks(2)
def test_a_model_that_changes_its_dtype(group: dist.ProcessGroup) -> None:
    sync = GradientSync(mesh_of(group, 2, 1))
    model = nn.Linear(6, 6)
    x = torch.full((1, 6), group.rank() + 1.0)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).zero_grad()
        sync.watch(model)
        model(x.to(dtype)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.eq(3).all() and model.weight.grad.dtype == dtype


def _fail(grad: Tensor) -> None:
    raise RuntimeError("on purpose")


@on_ranks(4)
def test_dtensors_and_copies(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 2, 2)
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.fill_(1)
    for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
        local = getattr(model, name).detach()
        shard = DTensor.from_local(local, mesh["tp"], [Replicate()]).redistribute(placements=[placement])
        setattr(model, name, nn.Parameter(shard))
    sync = GradientSync(mesh["cp"])
    cp_rank = mesh["cp"].get_local_rank()
    # Copies and pickles of a synced model are synced once they are watched, by their own hooks.
    sync.watch(model)
    twin, twin_sync = copy.deepcopy((model, sync))
    assert isinstance(pickle.loads(pickle.dumps(GradientSync(mesh["cp"]))), GradientSync)
    for module, its_sync in ((model, sync), (twin, twin_sync)):
        for round_number in (1, 2):
            its_sync.watch(module)
            x = torch.full((2, 5), cp_rank + 1.0)
            weight, bias = module.weight.to_local(), module.bias.to_local()
            (x @ weight.t()).sum().backward(retain_graph=True)
            (bias * (cp_rank + 1.0)).sum().backward()
            for parameter, value in ((module.weight, 6.0), (module.bias, 3.0)):
                assert isinstance(parameter.grad, DTensor)
                assert parameter.grad.placements == parameter.placements
                assert parameter.grad.shape == parameter.shape
                assert torch.equal(parameter.grad.full_tensor(), torch.full(parameter.shape, value * round_number))


@on_ranks(2)
def test_a_pickle_with_the_id_of_what_was_hooked(group: dist.ProcessGroup) -> None:
    model, sync = Mixed(), GradientSync(mesh_of(group, 2, 1))
    sync.watch(model)
    first = pickle.loads(pickle.dumps(model.first.weight))
    first._fused_tp_gradient_summed = id(first)  # as if it reused the memory of the old one
    model.first.weight = first
    step(model, sync, tokens_of(group.rank()))
    alone = Mixed()
    alone(tokens_of(group.rank())).square().mean().backward()
    assert_sums(group, model, alone)


@on_ranks(2)
def test_complex_gradients(group: dist.ProcessGroup) -> None:
    model, sync = nn.Module(), GradientSync(mesh_of(group, 2, 1))
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    sync.watch(model)
    (model.phase * (1 + 2j)).real.sum().backward()
    assert model.phase.grad is not None and torch.equal(model.phase.grad, torch.full((3,), 2 - 4j))


@on_ranks(2)
def test_models_are_freed(group: dist.ProcessGroup) -> None:
    model, sync = Mixed(), GradientSync(mesh_of(group, 2, 1))
    step(model, sync, tokens_of(group.rank()))
    held = weakref.ref(model.first.weight)
    del model, sync
    gc.collect()
    assert held() is None


@on_ranks(2)
def test_sparse_gradients_are_refused(group: dist.ProcessGroup) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(ValueError, match="sparse=False"):
        step(model, GradientSync(mesh_of(group, 2, 1)), torch.tensor([1, 2]))


class Routed(nn.Module):
    """Model that routes each token to one of many experts, so that some ranks have no token for some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(67, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 67)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = tokens % 7 == number
            if bool(chosen.any()):
                y[chosen] = expert(x[chosen])
        return self.head(x + y)


@on_ranks(3)
@pytest.mark.parametrize("shm", ["1", "0"])
def test_experts_that_some_ranks_have_no_token_for(group: dist.ProcessGroup, shm: str) -> None:
    with mock.patch.dict(os.environ, FUSED_TP_SHM=shm):
        whole = Routed()
        parallel = parallelize(copy_of(whole), mesh_of(group, 3, 1))
        for seed in range(6):  # some experts have tokens on no rank
            tokens = torch.randint(67, (1, 9), generator=torch.Generator().manual_seed(seed))
            for model in (whole, parallel):
                model(tokens).square().mean().backward()
        assert_same_gradients(parallel, whole)
        loss = parallel(tokens).square().mean()
        loss = parallel(tokens).square().mean()
        with pytest.raises(ValueError, match="only some of the context parallel ranks have used"):
            torch.autograd.grad(loss, list(parallel.experts.parameters()), allow_unused=True)
        for model in (whole, parallel):
            model(tokens).square().mean().backward()
        assert_same_gradients(parallel, whole)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_experts_of_a_model_that_its_caller_checkpoints(group: dist.ProcessGroup, use_reentrant: bool) -> None:
    """Run one backward for two forward passes; it recomputes the first."""
    whole, tokens = Routed(), torch.arange(7)[None]
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1))
    for model in (whole, parallel):
        given = torch.zeros((), requires_grad=True)  # a reentrant checkpoint needs an input with a gradient
        again = checkpoint(lambda x, m=model: m(tokens[:, :4]) + x, given, use_reentrant=use_reentrant)
        (again.square().mean() + model(tokens).square().mean()).backward()
    assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_experts_after_a_backward_that_raised(group: dist.ProcessGroup) -> None:
    whole, tokens = Routed(), torch.arange(7)[None]
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1))
    first, second = (parallel(given).square().mean() for given in (tokens.flip(1), tokens))
    handle = parallel.embed.weight.register_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        first.backward()
    handle.remove()
    parallel.zero_grad()
    second.backward()
    whole(tokens).square().mean().backward()
    assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_refusals_of_gradients_that_could_not_be_summed(group: dist.ProcessGroup) -> None:
    mesh, tokens = mesh_of(group, 2, 1), make_tokens(1, 9)
    whole = Routed()
    for model in (
        DistributedDataParallel(parallelize(copy_of(whole), mesh), process_group=group),
        parallelize(copy_of(whole), mesh),
    ):
        if not isinstance(model, DistributedDataParallel):
            for parameter in model.experts.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(ValueError, match="reads them earlier"):
            model(tokens)
    model = parallelize(copy_of(whole), mesh)
    model.experts[0].forward = partial(checkpoint, model.experts[0].forward, use_reentrant=True)
    with pytest.raises(ValueError, match="Pass use_reentrant=False to checkpoint"):
        model(tokens)
    plain = parallelize(Branching(), mesh)
    loss = plain(tokens).square().mean()
    with pytest.raises(RuntimeError, match="Omit create_graph"):
        torch.autograd.grad(loss, list(plain.parameters()), create_graph=True)
    plain(tokens)
    scaled = {name: 1.5 * p for name, p in plain.named_parameters()}
    with pytest.raises(ValueError, match=r"'embed\.weight' .*was computed from other tensors"):
        torch.func.functional_call(plain, scaled, (tokens,))
    plain.head.weight.main_grad = torch.zeros(67, 8)
    with pytest.raises(ValueError, match=r"'head.weight' accumulates its gradient in main_grad, which grad_sync=True"):
        plain(tokens)


class Branching(nn.Module):
    """Model that uses one of two layers of equal shapes, or both, depending on the tokens of the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(67, 8)
        self.even, self.odd, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 67)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        odd = tokens % 2 == 1
        for chosen, layer in ((~odd, self.even), (odd, self.odd)):
            if bool(chosen.any()):
                x = x.masked_scatter(chosen[..., None], layer(x[chosen]))
        return self.head(x)


@on_ranks(2)
@pytest.mark.parametrize("shm", ["1", "0"])
def test_sums_of_different_parameters_are_an_error(group: dist.ProcessGroup, shm: str) -> None:
    """Each rank uses another one of two layers, only after the forward passes that are checked."""
    parted = torch.tensor([[2, 4, 1, 3, 5, 7, 6, 8]])  # zigzag: rank 0 has both ends, rank 1 the middle
    whole = Branching()
    for every in ("1000", "1"):
        with mock.patch.dict(os.environ, FUSED_TP_SHM=shm, FUSED_TP_CHECK_BATCH=every):
            model = parallelize(copy_of(whole), mesh_of(group, 2, 1))
            for _ in range(3):
                model(torch.arange(8)[None]).square().mean().backward()
            model.zero_grad()
            if every == "1000":
                with pytest.raises(RankMismatchError, match=r"'(odd|even)\.bias', rank 1: '(odd|even)\.b"):
                    model(parted).square().mean().backward()
            else:
                for one in (whole, model):
                    one(parted).square().mean().backward()
                assert_same_gradients(model, whole)
