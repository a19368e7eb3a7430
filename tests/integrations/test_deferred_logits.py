"""Logits of a forward pass with labels and `loss_parallel`: computed when they are read, and then right."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from fused_tp.ops import vocab_statistics
from fused_tp.parallelizing.deferred_logits import DeferredLogits
from fused_tp.parallelizing.mesh import fsdp_mesh, make_mesh
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import VOCAB, copy_of, make, mesh_of
from tests.reference import refuses
from tests.workers import on_ranks


@contextmanager
def deferring() -> Iterator[None]:
    """Context manager in which logits of any size are deferred; else only those of more than 32 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_statistics, "MAX_CHUNK_BYTES", 0)
        yield


def batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def own_columns(whole: Tensor, group: Any) -> Tensor:
    return whole.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
@deferring()
def test_values_and_gradients_of_what_is_read(group: Any, sequence_parallel: bool) -> None:
    whole = make("llama")
    parallel = parallelize(
        copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=sequence_parallel, loss_parallel=True
    )
    for _ in range(3):  # the first passes are compared with the whole model
        parallel.zero_grad()
        output = parallel(**batch())
        output.loss.backward()
    wanted = whole(**batch())
    assert isinstance(output.logits, DeferredLogits) and not output.logits.is_computed
    assert output.logits.shape == (2, 9, own_columns(wanted.logits, group).shape[-1]) and len(output.logits) == 2
    assert output.logits.dtype is torch.float32 and not output.logits.requires_grad and not output.logits.is_computed
    if dist.get_rank(group) == 0:  # one rank alone
        torch.testing.assert_close(output.logits + 0, own_columns(wanted.logits, group), rtol=1e-4, atol=1e-5)
        assert torch.equal(output["logits"].argmax(-1), own_columns(wanted.logits, group).argmax(-1))
    # A loss of the logits has the gradient of this rank's columns, as that of logits in memory.
    parallel.zero_grad()
    output = parallel(**batch())
    (output.loss + output.logits.square().sum()).backward()
    (wanted.loss + wanted.logits.square().sum()).backward()
    grad = parallel.lm_head.weight.grad.full_tensor()
    torch.testing.assert_close(grad, whole.lm_head.weight.grad, rtol=1e-4, atol=1e-4)


@on_ranks(2)
@deferring()
def test_reading_too_late_is_an_error(group: Any) -> None:
    parallel = parallelize(make("llama"), mesh_of(group, 1, 2), loss_parallel=True)
    output = parallel(**batch())
    refuses(RuntimeError, "computed its loss without its logits", output.logits.retain_grad)
    refuses(RuntimeError, "computed its loss without its logits", output.logits.register_hook, print)
    output.loss.backward()
    for keywords in ({"foreach": False}, {"foreach": True}, {"fused": True}):  # which count their writes differently
        output = parallel(**batch())
        output.loss.backward()
        torch.optim.AdamW(parallel.parameters(), lr=0.1, **keywords).step()
        refuses(RuntimeError, "Read them before the optimizer's step", output.logits.sum)
    with torch.no_grad():  # an evaluation reads its logits: they are computed once
        assert type(parallel(**batch()).logits) is Tensor


@on_ranks(4)
@deferring()
def test_fsdp_frees_the_weight(group: Any) -> None:
    mesh = make_mesh("cpu", dp_shard=2, tp=2)
    whole = make("llama")
    for wraps_head in (False, True):
        parallel = parallelize(copy_of(whole), mesh, loss_parallel=True, verify=False)
        if wraps_head:
            fully_shard(parallel.lm_head, mesh=fsdp_mesh(mesh))
        fully_shard(parallel, mesh=fsdp_mesh(mesh))
        output = parallel(**batch())
        torch.testing.assert_close(output.loss, whole(**batch()).loss, rtol=1e-5, atol=1e-6)
        assert isinstance(output.logits, DeferredLogits) == (not wraps_head)
        early = output.logits + 0
        torch.testing.assert_close(
            early, own_columns(whole(**batch()).logits, mesh["tp"].get_group()), atol=1e-5, rtol=1e-4
        )
        again = parallel(**batch())
        again.loss.backward()
        if not wraps_head:
            refuses(RuntimeError, "freed by FSDP since that pass. Read them before backward", again.logits.sum)


@pytest.mark.parametrize(
    "kind", ["float", "float in place", "scale", "cap", "negative cap", "cap twice", "shift", "in place", "slice"]
)
@on_ranks(2)
@deferring()
def test_functions_between_head_and_loss(group: Any, kind: str) -> None:
    change = {
        "float": lambda y: y.float(),
        "float in place": lambda y: (y.float(), y.mul_(2.0))[0],  # in float32 one tensor
        "negative cap": lambda y: y.tanh() * -2,
        "scale": lambda y: 0.5 * (y * 3) / 2.0,
        "cap": lambda y: torch.tanh(y / 0.2) * 0.2,
        "cap twice": lambda y: (y * 4).tanh().tanh() * 2,
        "shift": lambda y: y * 2 + 0.5 * y.square(),
        "in place": lambda y: y.mul_(2.0),
        "slice": lambda y: y[..., :] * 3,
    }[kind]
    whole = make("llama")
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), loss_parallel=True, verify=False)
    for model in (whole, parallel):
        model.lm_head.register_forward_hook(lambda module, args, y: change(y))
    wanted, output = whole(**batch()), parallel(**batch())
    is_deferred = isinstance(output.logits, DeferredLogits) and not output.logits.is_computed
    assert is_deferred == (kind in ("float", "scale", "cap"))
    for loss in (wanted.loss, output.loss):
        loss.backward()
    torch.testing.assert_close(output.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    grads = {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}
    for name, p in whole.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(output.logits + 0, own_columns(wanted.logits, group), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_logits_are_not_in_memory(group: Any) -> None:
    """1 GiB of fp32 logits, of which backward would need several: the process grows by a tenth of that."""
    model = make("llama", vocab_size=65536, hidden_size=16)
    parallel = parallelize(model, mesh_of(group, 1, 2), loss_parallel=True, verify=False)
    ids = torch.randint(65536, (2, 4096), generator=torch.Generator().manual_seed(1))
    parallel(input_ids=ids[:, :64], labels=ids[:, :64]).loss.backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parallel(input_ids=ids, labels=ids).loss.backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB; attention takes most of it


@pytest.mark.parametrize("step", [0, 6])
@pytest.mark.parametrize("reads_inside", [False, True])
@on_ranks(2)
@deferring()
def test_losses_of_one_ranks_logits_are_logged(group: Any, step: int, reads_inside: bool) -> None:
    parallel = parallelize(make("llama"), mesh_of(group, 1, 2), loss_parallel=True)
    if reads_inside:  # before the loss, which is then computed from them
        parallel.lm_head.register_forward_hook(lambda module, args, y: y + 0 * y.mean())
    messages: list[str] = []
    logging.disable(logging.NOTSET)  # another test of these processes may have disabled warnings
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fused_tp").addHandler(handler)
    for i in range(8):
        output = parallel(**batch())
        loss = output.loss
        if i == step:
            assert not any("computed also from an output" in message for message in messages), messages
            loss = loss + output.logits.float().logsumexp(-1).square().mean()
        loss.backward()
    logging.getLogger("fused_tp").removeHandler(handler)
    said = [message for message in messages if "computed also from an output of shape [2, 9, 3" in message]
    assert bool(said) or dist.get_rank(group) > 0, messages  # rank 0 logs
