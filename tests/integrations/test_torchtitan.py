"""torchtitan's Llama with the overrides, against one process and against its own parallelize function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

import fused_tp
from tests.integrations.models import assert_near
from tests.workers import error_of, on_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed; pip install torchtitan")
pytestmark = pytest.mark.full

OURS = "fused_tp.integrations.torchtitan"
FUSED = (f"{OURS}.attention", f"{OURS}.feed_forward")
BATCH, SEQ, VOCAB = 4, 32, 2048


def on_cpu() -> None:
    """Set the device before other imports of torchtitan: without an accelerator it assumes "cuda"."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu


def dims_of(backend: str, dp: int = 1, cp: int = 1, tp: int = 1) -> Any:
    on_cpu()
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend(backend)
    sizes = {"dp_replicate": 1, "dp_shard": dp, "cp": cp, "tp": tp, "pp": 1, "ep": 1}
    dims = ParallelDims(**sizes, world_size=dp * cp * tp, spmd_backend=backend)
    dims.build_mesh()
    return dims


def config_of(overrides: Any = (), *, sp: bool = True, change: Callable[[Any], None] | None = None) -> Any:
    """Config of the debug model with two layers and attention that runs on CPU."""
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = llama3_configs["debugmodel"](attn_backend="flex")
    del config.layers[2:]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if change is not None:
        change(config)
    set_llama3_sharding_config(config, enable_sp=sp)
    apply_overrides(OverrideConfig(imports=list(overrides)), config)
    return config


def made(config: Any) -> Any:
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def parallelized(model: Any, dims: Any, *, sp: bool, ac: Any = None, precision: str = "float32") -> Any:
    """Parallelize a model by torchtitan's own function."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.llama3 import parallelize_llama

    parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=precision),
        parallelism=ParallelismConfig(spmd_backend=dims.spmd_backend, enable_sequence_parallel=sp),
        compile_config=CompileConfig(),
        ac_config=ac,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other
    return model


def batch_of(dims: Any, shard: Callable[[Tensor], Tensor] = lambda t: t) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and labels of the whole batch, and those of this rank."""
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    ranks = dims.dp_shard
    own = dims.get_mesh("batch").get_local_rank() if ranks > 1 else 0
    return tokens, labels, *(shard(t.chunk(ranks)[own]) for t in (tokens, labels))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of this rank in the mean loss over all tokens of the batch."""
    if isinstance(logits, DTensor):
        names = logits.device_mesh.mesh_dim_names or ()
        kept = [Replicate() if name == "tp" else p for name, p in zip(names, logits.placements, strict=True)]
        logits = logits.redistribute(placements=kept).to_local(grad_placements=kept)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * SEQ)


def of_one_process(config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    whole = made(config)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    loss = loss_of(whole(tokens), tokens.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in whole.named_parameters()}


def trained(model: Any, dims: Any, *, typecheck: bool = False) -> Tensor:
    """The loss of the batch, after a backward pass."""
    from torchtitan.distributed.full_dtensor import parallelize_inputs
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, spmd_typecheck

    *_, tokens, labels = batch_of(dims)
    positions = {"positions": torch.arange(SEQ).repeat(len(tokens), 1)} if typecheck else {}
    if dims.spmd_backend == "full_dtensor":
        tokens, _, _ = parallelize_inputs(dims, tokens, labels, {})
    elif typecheck:
        annotate_input_spmd_types(dims, tokens, labels.clone(), positions)
    with get_spmd_context(parallel_dims=dims)():
        with spmd_typecheck(local=False) if typecheck else nullcontext():
            logits = model(tokens, **positions)
        if dims.spmd_backend == "spmd_types":
            # Logits are [batch, seq, vocab / W]; with gathered ones all tensor parallel ranks compute the same loss.
            logits = fused_tp.ops.collectives.gather(logits, -1, group=dims.get_mesh("tp"))
        loss = loss_of(logits, labels)
        loss.backward()
    total = loss.detach().clone()
    if dims.dp_shard > 1:
        dist.all_reduce(total, group=dims.get_mesh("batch").get_group())
    return total


def check(model: Any, loss: Tensor, wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(loss, wanted[0], rtol=1e-6, atol=0)
    named = dict(model.named_parameters())
    names = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in named.items()}
    assert list(names) == list(wanted[1])
    for name, p in names.items():
        assert_near(p.grad, wanted[1][name], f"gradient of {name}", 1e-5)


@on_ranks(4)
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
def test_fsdp_and_tensor_parallel_ranks(group: dist.ProcessGroup, backend: str, sp: bool) -> None:
    """Use torchtitan's parallelize_llama. (Its third backend needs an FSDP2 that torch 2.13 lacks.)"""
    dims = dims_of(backend, dp=2, tp=2)
    wanted, states = of_one_process(config_of(sp=sp)), {}
    for overrides in ((), FUSED):
        model = parallelized(made(config_of(overrides, sp=sp)), dims, sp=sp)
        check(model, trained(model, dims), wanted)
        states[overrides] = {name: (t.shape, t.placements) for name, t in model.state_dict().items()}
        assert "layers.0.attention.qkv_linear.wq.weight" in states[overrides]
    assert states[()] == states[FUSED]
    kinds = {type(module).__name__ for module in model.modules()}
    assert {"FusedGatherQKVLinear", "ScatterLinear", "FusedFeedForward"} <= kinds


def separate_with_biases(config: Any) -> None:
    """Use separate layers for q, k and v, and biases in column-parallel layers."""
    from torchtitan.models.common.attention import QKVLinear

    for layer in config.layers:
        attention, wqkv = layer.attention, layer.attention.qkv_linear.wqkv
        inits = dict.fromkeys(("weight", "bias"), partial(torch.nn.init.normal_, std=0.05))
        linear = type(wqkv)(in_features=wqkv.in_features, out_features=256, bias=True, param_init=inits)
        attention.qkv_linear = QKVLinear.Config(head_dim=16, wq=linear, wkv=copy.deepcopy(linear))
        for name in ("w1", "w3"):
            w = getattr(layer.feed_forward, name)
            w.bias, w.param_init = True, inits


@on_ranks(4)
def test_separate_projections_biases_and_recomputation(group: dist.ProcessGroup) -> None:
    dims = dims_of("partial_dtensor", tp=4)
    from torchtitan.distributed.activation_checkpoint import FullAC

    wanted = of_one_process(config_of(change=separate_with_biases))
    config = config_of(FUSED, change=separate_with_biases)
    model = parallelized(made(config), dims, sp=True, ac=FullAC.Config())
    check(model, trained(model, dims), wanted)
    assert "GatherQKVLinear" in {type(module).__name__ for module in model.modules()}


@on_ranks(4)
@pytest.mark.parametrize("sp", [True, False])
def test_default_backend_with_its_type_checks(group: dist.ProcessGroup, sp: bool) -> None:
    dims = dims_of("spmd_types", dp=2, tp=2)
    wanted, grads = of_one_process(config_of(sp=sp)), {}
    for overrides in ((), FUSED):
        model = made(config_of(overrides, sp=sp))
        model.parallelize(dims)
        for typecheck in (False, True):
            model.zero_grad()
            torch.testing.assert_close(trained(model, dims, typecheck=typecheck), wanted[0], rtol=1e-6, atol=0)
        grads[overrides] = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in grads[FUSED].items():
        assert_near(gradient, grads[()][name], f"gradient of {name}", 1e-5)


@on_ranks(4)
def test_compiled_layers_and_frozen_weights(group: dist.ProcessGroup) -> None:
    dims = dims_of("spmd_types", dp=2, tp=2)
    wanted, _ = of_one_process(config_of())
    model = made(config_of(FUSED))
    model.parallelize(dims)
    for layer in model.layers.values():
        layer.attention.wo.weight.requires_grad_(False)
        layer.feed_forward.w1.weight.requires_grad_(False)
    first = trained(model, dims)
    torch.testing.assert_close(first, wanted, rtol=1e-6, atol=0)
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    for layer in model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(trained(model, dims), first)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, grads[name]), name
    with torch.no_grad():
        model.eval()
        assert torch.isfinite(model(batch_of(dims)[2])).all()


@on_ranks(4)
def test_without_tensor_parallel_ranks(group: dist.ProcessGroup) -> None:
    dims = dims_of("partial_dtensor", dp=4)
    model = parallelized(made(config_of(FUSED)), dims, sp=True)
    check(model, trained(model, dims), of_one_process(config_of()))


# -- context parallel -------------------------------------------------------------------------------------------------


def positions_of() -> Tensor:
    """Positions [batch, seq] of documents that differ from row to row."""
    rows = [[12, 1, 19], [32], [5, 27], [1, 1, 30]]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def seen_of(positions: Tensor) -> Tensor:
    """Causal mask of documents, bool [batch, 1, seq, seq]."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return (same & torch.ones(SEQ, SEQ, dtype=torch.bool).tril())[:, None]


def attend_densely(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, attn_mask=seen_of(positions_of()), enable_gqa=True)
    return out.transpose(1, 2)


def half_the_key_heads(config: Any) -> None:
    from torchtitan.models.common.attention import QKVLinear

    for layer in config.layers:
        attention = layer.attention
        linear = type(attention.wo)
        sizes = {"in_features": 256, "param_init": {"weight": attention.wo.param_init["weight"]}}
        attention.n_kv_heads = 8
        wq, wkv = (linear(out_features=n, **sizes) for n in (256, 128))
        attention.qkv_linear = QKVLinear.Config(head_dim=16, wq=wq, wkv=wkv)


RING = ((f"{OURS}.attention", {"ring": "zigzag"}), f"{OURS}.feed_forward")


@on_ranks(4)
@pytest.mark.parametrize(("cp", "tp"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_ring_over_packed_documents(group: dist.ProcessGroup, cp: int, tp: int, layout: str) -> None:
    dims = dims_of("spmd_types", cp=cp, tp=tp)
    from torchtitan.distributed.context_parallel.api import prepare_context_parallel_input
    from torchtitan.distributed.full_dtensor import validate_config
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, spmd_typecheck

    whole = made(config_of(change=half_the_key_heads))
    for layer in whole.layers.values():
        layer.attention.inner_attention.forward = attend_densely
    tokens, labels, *_ = batch_of(dims)
    wanted = loss_of(whole(tokens, positions_of()), labels)
    wanted.backward()

    overrides = ((f"{OURS}.attention", {"ring": layout}), f"{OURS}.feed_forward")
    model = made(config_of(overrides, change=half_the_key_heads))
    validate_config(dims, model)  # it refuses torchtitan's own attention over context parallel ranks
    model.parallelize(dims)
    mesh, how = dims.get_mesh("cp"), {"positions": positions_of()}
    balancer = "headtail" if layout == "zigzag" else None
    own, own_labels, kwargs = prepare_context_parallel_input(
        tokens, labels, how, mesh, torch.device("cpu"), balancer, None
    )
    with get_spmd_context(parallel_dims=dims)():
        annotate_input_spmd_types(dims, own, own_labels.clone(), kwargs)
        with spmd_typecheck(local=False):
            logits = model(own, **kwargs)
        if tp > 1:
            logits = fused_tp.ops.collectives.gather(logits, -1, group=dims.get_mesh("tp"))
        loss = loss_of(logits, own_labels)
        loss.backward()
        other = {"positions": kwargs["positions"].roll(1, 1)}
        assert "must increase by one" in str(error_of(model, own, **other))
        assert "attention_masks is not supported with ring" in str(
            error_of(model, own, **kwargs, attention_masks=seen_of)
        )
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    torch.testing.assert_close(total, wanted.detach(), rtol=1e-6, atol=0)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in model.named_parameters():
        gradient = p.grad.clone()
        dist.all_reduce(gradient, group=mesh.get_group())
        good = expected[name]
        if tp > 1 and "norm" in name:  # tokens are sharded over these ranks
            dist.all_reduce(gradient, group=dims.get_mesh("tp").get_group())
        elif tp > 1:
            dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            good = good.chunk(tp, dim)[dims.get_mesh("tp").get_local_rank()]
        assert_near(gradient, good, f"gradient of {name}", 1e-5)


@on_ranks(4)
def test_ring_of_one_rank_and_bf16(group: dist.ProcessGroup) -> None:
    """Use torchtitan's own function, which mixes precisions by default."""
    dims = dims_of("partial_dtensor", dp=2, tp=2)
    whole = made(config_of(change=half_the_key_heads))
    for layer in whole.layers.values():
        layer.attention.inner_attention.forward = attend_densely
    tokens, labels, own, own_labels = batch_of(dims)
    wanted = loss_of(whole(tokens, positions_of()), labels)
    wanted.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for precision, tolerance in (("float32", 1e-5), ("bfloat16", 5e-2)):
        model = made(config_of(RING, change=half_the_key_heads))
        parallelized(model, dims, sp=True, precision=precision)
        positions = positions_of().chunk(2)[dims.get_mesh("batch").get_local_rank()]
        loss = loss_of(model(own, positions).float(), own_labels)
        loss.backward()
        for name, p in model.named_parameters():
            assert_near(p.grad, expected[name], f"gradient of {name}", tolerance)


@on_ranks(4)
def test_variable_lengths_by_a_wrapper_of_torchtitans_signature(group: dist.ProcessGroup) -> None:
    dims = dims_of("partial_dtensor", cp=4)
    from torchtitan.models.common.attention import (
        FlexAttention,
        ScaledDotProductAttention,
        VarlenAttention,
        create_varlen_metadata_for_document,
    )

    from fused_tp.integrations.torchtitan import apply_cp_to_forward

    mesh = dims.get_mesh("cp")
    q, k, v = (torch.randn(BATCH, SEQ, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    masks = create_varlen_metadata_for_document(positions_of())
    cut = [fused_tp.shard_sequence(t, 1, group=mesh).requires_grad_() for t in (q, k, v)]
    for module, given, seen in (
        (VarlenAttention.Config().build(), masks, seen_of(positions_of())),
        (VarlenAttention.Config(window_size=(3, 0)).build(), masks, seen_of(positions_of()).triu(-3)),
        (ScaledDotProductAttention.Config().build(), None, torch.ones(SEQ, SEQ, dtype=torch.bool).tril()),
    ):
        apply_cp_to_forward([module], mesh)
        out = module(*cut, attention_masks=given, enable_gqa=True)
        whole = [t.requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
        heads = [t.transpose(1, 2) for t in whole]
        wanted = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True).transpose(1, 2)
        assert_near(out, fused_tp.shard_sequence(wanted.detach(), 1, group=mesh), "out", 1e-5)
        found = torch.autograd.grad(out.square().sum(), cut)
        for mine, full in zip(found, torch.autograd.grad(wanted.square().sum(), whole), strict=True):
            assert_near(mine, fused_tp.shard_sequence(full, 1, group=mesh), "gradient", 1e-5)
    short = create_varlen_metadata_for_document(positions_of()[:, :16])
    varlen = VarlenAttention.Config().build()
    apply_cp_to_forward([varlen], mesh)
    assert "created before its tokens are sharded" in str(error_of(varlen, *cut, attention_masks=short))
    flex = FlexAttention.Config().build()
    assert "masks that a ring does not support" in str(error_of(apply_cp_to_forward, [flex], mesh))


# -- refusals ---------------------------------------------------------------------------------------------------------


def biased_rows(config: Any) -> None:
    for layer in config.layers:
        layer.attention.wo.bias = True


def windows(config: Any) -> None:
    from torchtitan.models.common.attention import VarlenAttention

    for layer in config.layers:
        layer.attention.inner_attention = VarlenAttention.Config(window_size=(3, 0))


def quantized(config: Any) -> None:
    from dataclasses import dataclass

    from torchtitan.models.common.linear import Linear

    @dataclass(kw_only=True, slots=True)
    class Float8Config(Linear.Config):
        pass

    for layer in config.layers:
        w1 = layer.feed_forward.w1
        layer.feed_forward.w1 = Float8Config(in_features=w1.in_features, out_features=w1.out_features)


@on_ranks(1)
def test_what_overrides_refuse(group: dist.ProcessGroup) -> None:
    on_cpu()
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import llama3_configs

    for change, overrides, says in (
        (biased_rows, FUSED, "a row-parallel layer with a bias"),
        (quantized, FUSED, "supports only torchtitan"),
        (windows, RING, "got window (3, 0)"),
    ):
        assert says in str(error_of(config_of, overrides, change=change)), says
    unsharded = llama3_configs["debugmodel"](attn_backend="flex")
    refused = error_of(apply_overrides, OverrideConfig(imports=list(FUSED)), unsharded)
    assert "Overrides run after update_from_config" in str(refused)
