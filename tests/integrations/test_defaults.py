"""Default dtypes and devices set by a program do not affect the tensors that fused_tp makes for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fused_tp
from fused_tp.nn import ContextKVCache, clip_grad_norm_
from tests.integrations.models import assert_near, copy_of, make, make_tokens, mesh_of
from tests.workers import on_ranks, run_fresh

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

META = torch.device("meta")  # simulates a GPU: tensors made there by accident have no values


@contextmanager
def default(what: torch.dtype | torch.device) -> Iterator[None]:
    if isinstance(what, torch.device):
        with what:
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(what)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train(group: dist.ProcessGroup, what: Any, layout: str, folder: Path) -> None:
    """Train a step, restore its checkpoint and generate tokens; compare all of these with one process."""
    tokens, whole = make_tokens(4, 12), make("llama").train()
    alone = copy_of(whole)
    loss = alone(tokens, labels=tokens).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9).step()
    with default(what):
        if layout == "pp":
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
            model: Any = fused_tp.pipeline(whole, mesh, microbatches=2)
            found, clipped = model.step({"input_ids": tokens, "labels": tokens}), model.clip_grad_norm_(0.1)
            modules = [stage.model for stage in model.stages.values()]
        else:
            mesh = mesh_of(group, 2, 1) if layout == "cp" else mesh_of(group, 1, 2)
            keywords = {"sp": {"sequence_parallel": True}, "loss": {"loss_parallel": True}}.get(layout, {})
            model = fused_tp.parallelize(whole, mesh, **keywords)
            found = model(tokens, labels=tokens).loss
            found.backward()
            clipped, modules = clip_grad_norm_(model, 0.1), [model]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        data = fused_tp.DistributedBatches(torch.arange(8, device="cpu"), mesh, 4, shuffle=True, epochs=1)
        assert len(list(data)) == 2
        with fused_tp.CheckpointManager(folder, model, optimizer, data=data) as checkpoints:
            checkpoints.save(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            assert checkpoints.restore() == 1
        if layout != "pp":
            generated = model.eval().generate(tokens, max_new_tokens=3, do_sample=False, disable_compile=True)
    assert_near(found, loss, "loss")
    assert_near(clipped, norm, "norm")
    wanted = alone.state_dict()
    for module in modules:
        for name, t in fused_tp.nn.gather_state_dict(module).items():
            assert_near(t, wanted[name], name)
    if layout != "pp":
        expected = alone.eval().generate(tokens, max_new_tokens=3, do_sample=False, disable_compile=True)
        assert torch.equal(generated, expected)


QUICK: list[tuple[Any, str]] = [(torch.bfloat16, "sp"), (META, "cp")]
OTHERS = [
    (what, layout)
    for what in (torch.bfloat16, torch.float16, torch.float64, META)
    for layout in ("tp", "sp", "loss", "cp", "pp")
    if (what, layout) not in QUICK
]


def train_each(group: dist.ProcessGroup, cases: list[tuple[Any, str]], folder: Path) -> None:
    for number, (what, layout) in enumerate(cases):
        train(group, what, layout, folder / str(number))


@pytest.mark.parametrize("cases", [QUICK, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["quick", "others"])
def test_training(cases: list[tuple[Any, str]], tmp_path: Path) -> None:
    run_fresh(2, train_each, cases, tmp_path)


@on_ranks(2)
def test_a_model_made_in_the_default_dtype(group: dist.ProcessGroup) -> None:
    with default(torch.bfloat16):
        whole, tokens = make("llama"), make_tokens(2, 8)
        model = fused_tp.parallelize(copy_of(whole), mesh_of(group, 1, 2))
        for one in (whole, model):
            one(tokens, labels=tokens).loss.backward()
    wanted = whole.lm_head.weight.grad
    assert wanted.dtype is torch.bfloat16
    assert_near(model.lm_head.weight.grad.float(), wanted.float(), "gradient", 0.05)


@pytest.mark.parametrize("what", [torch.bfloat16, torch.float64, META])
@on_ranks(2)
def test_caches_and_dropout(group: dist.ProcessGroup, what: Any) -> None:
    seeded = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 8, 2, 4, generator=seeded, device="cpu") for _ in range(3))
    found: list[list[torch.Tensor]] = []
    for given in (torch.float32, what):
        torch.manual_seed(1)
        with default(given), torch.no_grad():
            cache = ContextKVCache(group, block=2)
            cache.append(k, v, new_lengths=[8, 5])
            places = cache.positions(2, [2, 1])
            dropped = fused_tp.ring_attention(q, k, v, group=group, causal=True, dropout_p=0.5)
            found.append([cache.attend(q[:, -1:]), places, dropped])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
