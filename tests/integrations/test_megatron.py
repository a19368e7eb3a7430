"""Megatron-Core's GPTModel with fused layers, compared with one process and with Megatron's own layers."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import seeded
from tests.workers import error_of, on_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine and APEX, which need GPUs, are missing
    pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install megatron-core")
    from megatron.core import ModelParallelConfig, dist_checkpointing, parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.utils import get_batch_on_this_cp_rank

    from fused_tp.integrations.megatron import (
        FusedColumnParallelLinear,
        FusedDotProductAttention,
        FusedRowParallelLinear,
        SequenceParallelNorm,
        fused_layers,
        layer_spec,
        on_cpu,
    )

VOCAB, BATCH, SEQ = 96, 4, 16
# gradient_accumulation_fusion is on for fused_tp's layers only: Megatron's need APEX for it.
CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "use_cpu_initialization": True,
}
MATRICES = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight", "output_layer.weight")


@contextmanager
def parallel(tp: int = 1, cp: int = 1, **more: Any) -> Iterator[None]:
    """Initialize Megatron's groups over all ranks; the remaining ranks become data parallel."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp, **more)
    own = {"get_default_causal_mask": causal, "get_sliding_window_causal_mask": causal}
    # Megatron 0.16.1 leaves this name undefined without Transformer Engine.
    without_engine = mock.patch.object(moe_utils, "te_general_gemm", None, create=True)
    try:
        with on_cpu(), warnings.catch_warnings(), mock.patch.multiple(fused_softmax, **own), without_engine:
            warnings.simplefilter("ignore")  # Megatron recommends CUDA settings and calls deprecated functions of torch
            yield
    finally:
        parallel_state.destroy_model_parallel()


def make(fused: bool = True, tied: bool = False, config: type[Any] = TransformerConfig, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    made = config(**{**CONFIG, "gradient_accumulation_fusion": fused, **sizes, **changes})
    with fused_layers() if fused else nullcontext():
        return GPTModel(
            made,
            layer_spec(made)
            if fused
            else get_gpt_layer_local_spec(
                num_experts=made.num_moe_experts, normalization="RMSNorm", qk_layernorm=made.qk_layernorm
            ),
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
        )


def batches() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": torch.arange(SEQ).expand(BATCH, SEQ)}


def own_tokens(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tokens of this context parallel rank, sharded as in Megatron's training loop."""
    how: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # in 0.19
        how["is_hybrid_cp"] = False
    own: dict[str, Tensor] = get_batch_on_this_cp_rank(dict(batch), **how)
    return own


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["tokens"], batch["positions"], None, labels=batch["labels"]).float().mean()


def causal(size: int, size_kv: int | None = None, window: tuple[int, int] = (-1, 0)) -> Tensor:
    """Causal or window mask (True is hidden); replaces Megatron's, which is made with a literal device="cuda"."""
    hidden = torch.ones(size, size_kv or size, dtype=torch.bool).triu(1)
    return hidden if window[0] < 0 else hidden | torch.ones_like(hidden).tril(-window[0] - 1)


def gate_and_up(name: str, whole: Tensor, size: int) -> Tensor:
    """Reorder rows by rank, each with its shards of gate and up; a negative size reverses it."""
    if "linear_fc1" not in name:
        return whole
    shape = (2, size) if size > 0 else (-size, 2)
    return whole.unflatten(0, (*shape, -1)).transpose(0, 1).flatten(0, 2)


def load(model: nn.Module, whole: dict[str, Tensor]) -> None:
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = gate_and_up(name, whole[name], size)
            cut = getattr(p, "tensor_model_parallel", False)
            p.copy_(value.chunk(size, p.partition_dim)[rank] if cut else value)


def gathered(name: str, p: Any, grad: Tensor) -> Tensor:
    size = parallel_state.get_tensor_model_parallel_world_size()
    if not getattr(p, "tensor_model_parallel", False):
        return grad
    parts = [torch.empty_like(grad) for _ in range(size)]
    dist.all_gather(parts, grad.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return gate_and_up(name, torch.cat(parts, p.partition_dim), -size)


def reference(**changes: Any) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Weights, loss and gradients of Megatron's own layers in one process."""
    with parallel():
        model = make(fused=False, **changes)
        loss = loss_of(model, batches())
        loss.backward()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(whole: dict[str, Tensor], fused: bool = True, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole main_grads of two micro batches under Megatron's data parallelism; call it inside `parallel`."""
    model = make(fused, **changes)
    load(model, whole)
    # With overlap, Megatron's hooks require a gradient for every parameter.
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    ddp.zero_grad_buffer()
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    own = own_tokens({name: value.chunk(size)[rank] for name, value in batches().items()})
    halves = [{name: value.chunk(2)[half] for name, value in own.items()} for half in range(2)]
    losses = [loss_of(ddp, half) / 2 for half in halves]  # both before a backward, as in a pipeline
    with ddp.no_sync():
        losses[0].backward()
    losses[1].backward()
    if fused:
        assert all(p.grad_added_to_main_grad for name, p in model.named_parameters() if name.endswith(MATRICES))
    finalize_model_grads([ddp])
    loss = torch.stack([one.detach() for one in losses]).sum()
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    loss /= parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return loss.item(), {name: gathered(name, p, p.main_grad) for name, p in model.named_parameters()}


def check(found: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]], where: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-5), where
    assert found[1].keys() == wanted[1].keys()
    for name, grad in found[1].items():
        torch.testing.assert_close(
            grad, wanted[1][name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{where}, {name}: {m}"
        )


SIZES: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"tp": 2, "cp": 2}, {"sequence_parallel": True}),
    ({"tp": 2}, {}),
    ({"tp": 2, "cp": 2}, {"cp_comm_type": "a2a"}),
)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}
RECOMPUTED: tuple[dict[str, Any], ...] = (
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
)


@on_ranks(4)
def test_gradients_are_those_of_one_process(group: dist.ProcessGroup) -> None:
    weights, *wanted = reference()
    for sizes, more in SIZES[:2]:
        with parallel(**sizes):
            check(train(weights, **more), wanted, (sizes, more))


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [{}, {"add_bias_linear": True, "tied": True, "qk_layernorm": True}, EXPERTS],
    ids=["", "biases", "experts"],
)
@on_ranks(4)
def test_more_gradients_are_those_of_one_process(group: dist.ProcessGroup, changes: dict[str, Any]) -> None:
    weights, *wanted = reference(**changes)
    dense = "num_moe_experts" not in changes  # Megatron refuses to train experts without sequence_parallel
    for sizes, more in SIZES if dense else SIZES[:2]:
        with parallel(**sizes):
            check(train(weights, **changes, **more), wanted, (sizes, more))
    if dense:
        with parallel(tp=2):
            check(train(weights, fused=False, **changes), wanted, "Megatron's own layers")
    with parallel(tp=2, cp=2):
        for how in RECOMPUTED:
            check(train(weights, sequence_parallel=True, **changes, **how), wanted, how)


@pytest.mark.full
@on_ranks(4)
def test_context_parallel_attention(group: dist.ProcessGroup) -> None:
    """Windows and sinks; without Transformer Engine, Megatron provides the reference on one rank only."""
    hybrid: dict[str, Any] = {"hierarchical_context_parallel_sizes": [2, 2]}
    for changes in (
        {"window_size": (5, 0), "softmax_type": "learnable", "window_attn_skip_freq": 2},
        {"softmax_type": "off-by-one", "softmax_scale": 0.3},
        {"window_size": (3, 0), "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    ):
        weights, *wanted = reference(**changes)
        for sizes, more in (
            ({"tp": 2, "cp": 2}, {"sequence_parallel": True}),
            ({"cp": 4}, {"cp_comm_type": "a2a"}),
            ({"cp": 4, **hybrid}, {"cp_comm_type": "a2a+p2p", **hybrid}),
        ):
            with parallel(**sizes):
                check(train(weights, **changes, **more), wanted, (sizes, more, changes))


DOCUMENTS = (8, 12, 4, 16)  # multiples of twice the context parallel size


@on_ranks(4)
def test_packed_documents(group: dist.ProcessGroup) -> None:
    total = sum(DOCUMENTS)
    tokens, labels = torch.randint(VOCAB, (2, 1, total), generator=torch.Generator().manual_seed(2))
    pairs = [dict(zip(("tokens", "labels"), both, strict=True)) for both in _each(tokens, labels)]
    with parallel():
        whole = make(fused=False)
        for pair in pairs:
            position = torch.arange(pair["tokens"].shape[1])[None]
            (whole(pair["tokens"], position, None, labels=pair["labels"]).sum() / total).backward()
    weights = {name: p.detach() for name, p in whole.named_parameters()}
    bounds = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32)
    for sizes, more in (
        ({"tp": 2, "cp": 2}, {"sequence_parallel": True}),
        ({"tp": 2, "cp": 2}, {"cp_comm_type": "a2a"}),
        ({"tp": 2}, {}),
    ):
        with parallel(**sizes):
            model = make(gradient_accumulation_fusion=False, **more)
            load(model, weights)
            own = [own_tokens(pair) for pair in pairs]
            row = {name: torch.cat([pair[name] for pair in own], 1) for name in own[0]}
            packed = PackedSeqParams("thd", bounds, bounds, None, None, max(DOCUMENTS), max(DOCUMENTS))
            loss = model(row["tokens"], row["tokens"], None, labels=row["labels"], packed_seq_params=packed)
            (loss.sum() / total).backward()
            for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
                grad = p.grad
                if getattr(p, "sequence_parallel", False):
                    dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
                dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
                torch.testing.assert_close(gathered(name, p, grad), q.grad, rtol=1e-5, atol=1e-5)


def _each(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(row.split(DOCUMENTS, 1) for row in rows), strict=True)


@on_ranks(4)
def test_dropout_does_not_depend_on_ranks(group: dist.ProcessGroup) -> None:
    found: list[float] = []
    weights: dict[str, Tensor] = {}
    for sizes in ({}, {"tp": 2, "cp": 2}):
        with parallel(**sizes):
            model = make(attention_dropout=0.3)
            if weights:
                load(model, weights)
            weights = {name: p.detach() for name, p in model.named_parameters()}
            torch.manual_seed(3)
            batch = own_tokens(batches())
            loss = loss_of(model, batch).detach() / parallel_state.get_context_parallel_world_size()
            dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
            found.append(loss.item())
            assert loss_of(model.eval(), batch) == loss_of(model, batch)
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def where(state: dict[str, Any]) -> dict[str, Any]:
    """Everything in a sharded state dict except values."""
    names = ("key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id")
    return {key: [getattr(one, name, None) for name in names] for key, one in state.items()}


@pytest.mark.full
@on_ranks(4)
def test_checkpoint_of_two_ranks_is_loaded_by_one(group: dist.ProcessGroup, tmp_path: Path) -> None:
    changes = {"softmax_type": "learnable", "add_bias_linear": True}
    with parallel(tp=2):
        torch.manual_seed(0)
        saved = make(**changes)
        stock = make(fused=False, **changes)
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = saved.sharded_state_dict(metadata=metadata)
        assert where(state) == where(stock.sharded_state_dict(metadata=metadata))
        whole = {name: gathered(name, p, p.detach()) for name, p in saved.named_parameters()}
        dist_checkpointing.save(state, str(tmp_path))
    with parallel():
        loaded = make(**changes)
        for p in loaded.parameters():
            nn.init.zeros_(p)
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(metadata=metadata), str(tmp_path)))
        for name, p in loaded.named_parameters():
            assert torch.equal(p, whole[name]), name


class Whole(NamedTuple):
    """An unsharded linear layer with its input and output gradient, equal on every rank."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return y, and gradients of x, weight and bias."""
        leaves = [t.double().requires_grad_() for t in self[:3]]
        y = F.linear(*leaves)
        y.backward(self.grad.double())
        return (y.detach(), *(leaf.grad for leaf in leaves))


def whole_of(size: int, dtype: torch.dtype) -> Whole:
    shapes = (2 * size, 3, 5 * size), (7 * size, 5 * size), (7 * size,), (2 * size, 3, 7 * size)
    return Whole(*(seeded(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)))


@on_ranks(1, 2, 3)
def test_layers(group: dist.ProcessGroup) -> None:
    """Compare the layers, with each of their options, with a linear layer of torch."""
    size, rank = group.size(), group.rank()

    def own(t: Tensor, dim: int) -> Tensor:
        return t.chunk(size, dim)[rank].contiguous()

    def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())

    def summed(t: Tensor) -> Tensor:
        t = t.double()
        dist.all_reduce(t, group=group)
        return t

    for dtype, sp in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        config = ModelParallelConfig(
            tensor_model_parallel_size=size,
            sequence_parallel=sp and size > 1,
            params_dtype=dtype,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=True,
        )
        how: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_, "tp_group": group}
        x, weight, bias, grad = whole = whole_of(size, dtype)
        y, dx, dw, db = whole.run()
        for options in (
            {},
            {"gather_output": True},
            {"skip_bias_add": True},
            {"disable_grad_reduce": True},
            {"skip_weight_param_allocation": True},
        ):
            column = FusedColumnParallelLinear(5 * size, 7 * size, **how, **options)
            given = nn.Parameter(own(weight, 0))
            column.bias.data = own(bias, 0)
            if column.weight is not None:
                column.weight.data = given = given.data
            leaf = (own(x, 0) if config.sequence_parallel else x.clone()).requires_grad_()
            out, out_bias = column(leaf, None if column.weight is not None else given)
            assert (out_bias is None) == ("skip_bias_add" not in options)
            out = out if out_bias is None else out + out_bias
            gathered = "gather_output" in options
            close(out, y if gathered else own(y, -1), dtype)
            out.backward(grad if gathered else own(grad, -1))
            d_leaf = leaf.grad
            if "disable_grad_reduce" in options and not config.sequence_parallel:
                d_leaf = summed(d_leaf)
            close(d_leaf, own(dx, 0) if config.sequence_parallel else dx, dtype)
            close(given.grad if column.weight is None else column.weight.grad, own(dw, 0), dtype)
            close(column.bias.grad, own(db, 0), dtype)
            with torch.no_grad():
                assert (
                    column(leaf, given if column.weight is None else None, runtime_gather_output=True)[0].shape
                    == y.shape
                )
        for options in ({}, {"skip_bias_add": True}, {"input_is_parallel": False}):
            if config.sequence_parallel and "input_is_parallel" in options:
                continue
            options = {"input_is_parallel": True, "skip_bias_add": False, **options}
            row = FusedRowParallelLinear(5 * size, 7 * size, bias=True, **how, **options)
            row.weight.data, row.bias.data = own(weight, 1), bias.clone()
            cut = options["input_is_parallel"]
            leaf = (own(x, -1) if cut else x.clone()).requires_grad_()
            out, out_bias = row(leaf)
            out = out if out_bias is None else out + out_bias
            close(out, own(y, 0) if config.sequence_parallel else y, dtype)
            out.backward(own(grad, 0) if config.sequence_parallel else grad)
            close(leaf.grad, own(dx, -1) if cut else dx, dtype)
            close(row.weight.grad, own(dw, 1), dtype)
            assert row.bias.sequence_parallel == config.sequence_parallel  # Megatron sums it over ranks
            close(summed(row.bias.grad) if config.sequence_parallel else row.bias.grad, db, dtype)
            row.weight.requires_grad_(False)
            row.weight.grad = None
            row(leaf)[0].sum().backward()
            assert row.weight.grad is None


def attention(**changes: Any) -> Any:
    """Core attention of one layer."""
    sizes = {"context_parallel_size": parallel_state.get_context_parallel_world_size()}
    arguments = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "cp_comm_type": None}
    arguments |= {name: changes.pop(name) for name in tuple(changes) if name in arguments}
    unchecked = {name: changes.pop(name) for name in tuple(changes) if name in ("qk_clip",)}
    config = TransformerConfig(**{**CONFIG, **sizes, **changes})
    vars(config).update(unchecked)
    return FusedDotProductAttention(config, 1, **arguments)


def heads(seq: int, count: int, seed: int) -> Tensor:
    return seeded(seq, 2, count, 16, seed=seed)


@on_ranks(4)
def test_masks(group: dist.ProcessGroup) -> None:
    """Attention accepts a causal mask or none; with a cache there are more keys than queries."""
    q, k, v = heads(SEQ, 4, 0), heads(SEQ, 2, 1), heads(SEQ, 2, 2)
    whole = causal(SEQ).expand(2, 1, SEQ, SEQ)
    with parallel():
        core = attention(window_size=(6, 0))
        wanted = core(q, k, v, None)
        assert torch.equal(core(q, k, v, whole.contiguous()), wanted)
        last = core(q[-1:], k, v, whole[:, :, -1:], attn_mask_type=AttnMaskType.no_mask)
        torch.testing.assert_close(last, wanted[-1:])
        last = core(q[-3:], k, v, None, attn_mask_type=AttnMaskType.causal_bottom_right)
        torch.testing.assert_close(last, wanted[-3:])
        of_torch = F.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(attention()(q, k, v, None), of_torch.permute(2, 0, 1, 3).flatten(2))
    with parallel(cp=4):
        batch = {name: t.transpose(0, 1) for name, t in (("q", q), ("k", k), ("v", v), ("wanted", wanted))}
        own = {name: t.transpose(0, 1) for name, t in own_tokens(batch).items()}
        mask = own_tokens({"attention_mask": whole})["attention_mask"]
        for how in (None, mask):
            out = attention(window_size=(6, 0))(own["q"], own["k"], own["v"], how)
            torch.testing.assert_close(out, own["wanted"])
        full = attention(attn_mask_type=AttnMaskType.no_mask)(own["q"], own["k"], own["v"], None)
        of_torch = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), enable_gqa=True)
        wanted = own_tokens({"": of_torch.transpose(1, 2)})[""]
        torch.testing.assert_close(full, wanted.transpose(0, 1).flatten(2))


def refused(says: str, fn: Any, *args: Any, **keywords: Any) -> None:
    error = error_of(fn, *args, **keywords)
    assert isinstance(error, ValueError) and says in str(error), (says, error)


@on_ranks(4)
def test_refusals(group: dist.ProcessGroup) -> None:
    with parallel(cp=2):
        q, k, v = heads(8, 4, 0), heads(8, 2, 1), heads(8, 2, 2)
        refused("attention_type='cross'", attention, attention_type="cross")
        refused("qk_clip=True", attention, qk_clip=True)
        refused("'p2p' sends the same data as 'all_gather'", attention, cp_comm_type="all_gather")
        refused("hierarchical_context_parallel_sizes", attention, cp_comm_type="a2a+p2p")
        core = attention()
        refused("attention_bias", core, q, k, v, None, attention_bias=q)
        refused("is not the causal mask", core, q, k, v, torch.zeros(1, 1, 8, 16, dtype=torch.bool))
        refused("is not the causal mask", core, q, k, v, causal(8)[None, None])
        refused("Pass None", core, q, k, v, causal(8), attn_mask_type=AttnMaskType.no_mask)
        for kind in (AttnMaskType.arbitrary, AttnMaskType.padding):
            refused("must be causal or no_mask", core, q, k, v, None, attn_mask_type=kind)
        refused("Decode without context parallelism", core, q[:1], k, v, None)
        bounds, row = torch.tensor([0, 8, 16]), [t[:, 0] for t in (q, k, v)]
        for says, how in {
            "must be 'thd'": {"qkv_format": "sbhd"},
            "cp_group and local_cp_size": {"local_cp_size": 1},
            "must have a multiple of 4 tokens": {"cu_seqlens_q": torch.tensor([0, 6, 16])},
            "must end with 16, the number of tokens": {"cu_seqlens_q": torch.tensor([0, 8, 12])},
        }.items():
            given = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, **how}
            refused(says, core, *row, None, packed_seq_params=PackedSeqParams(**given))
        padded = PackedSeqParams("thd", bounds, bounds, bounds + 1, bounds + 1)
        refused("attend to padding", core, *row, None, AttnMaskType.no_mask, None, padded)
    with parallel(tp=2):
        config = TransformerConfig(**CONFIG, tensor_model_parallel_size=2)
        mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=nn.Linear, linear_fc2=nn.Linear))
        refused("got Linear. Create base by a local spec", layer_spec, config, mlp)
        column = {"config": config, "init_method": nn.init.zeros_}
        refused(
            "defer_embedding_wgrad_compute", FusedColumnParallelLinear, 4, 4, **column, embedding_activation_buffer=[]
        )
        layer = FusedColumnParallelLinear(4, 4, **column, skip_weight_param_allocation=True)
        refused("weight must have shape [2, 4]", layer, torch.zeros(2, 4))
        refused("got (4, 4)", layer, torch.zeros(2, 4), torch.zeros(4, 4))
        weight = torch.zeros(2, 4)
        vars(weight)["__fsdp_param__"] = True
        refused("Megatron-FSDP is not supported", layer, torch.zeros(2, 4), weight)
        row_of = {**column, "bias": True, "input_is_parallel": True}
        refused("token dispatcher", FusedRowParallelLinear, 4, 4, **row_of, skip_bias_add=False, is_expert=True)
        for name, value in {"moe_layer_freq": [0, 1], "multi_latent_attention": True}.items():
            other = TransformerConfig(**CONFIG, num_moe_experts=2)
            vars(other)[name] = value
            refused(name, layer_spec, other)
        for name in ("fp8", "delay_wgrad_compute", "cpu_offloading"):
            vars(config)[name] = True
            refused(name, FusedColumnParallelLinear, 4, 4, **column)
            refused(name, FusedRowParallelLinear, 4, 4, **row_of, skip_bias_add=True)
            vars(config)[name] = False


def inside(spec: Any) -> Any:
    """Submodules of a spec; Megatron 0.19 uses partial functions for some specs."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def test_specs_of_blocks() -> None:
    """layer_spec replaces classes in blocks, lists and partial functions, and leaves the given spec unchanged."""
    config = TransformerConfig(**CONFIG)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    block = TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=WrappedTorchNorm)
    fused = layer_spec(config, block)
    assert fused.layer_norm is SequenceParallelNorm and block.layer_norm is WrappedTorchNorm
    for one in fused.layer_specs:
        own = one.submodules.self_attention.submodules
        assert own.linear_qkv is FusedColumnParallelLinear and own.core_attention is FusedDotProductAttention
        assert one.module is layer.module and inside(one.submodules.mlp).linear_fc2 is FusedRowParallelLinear
    assert layer.submodules.self_attention.submodules.linear_qkv is ColumnParallelLinear
    made = layer_spec(config, functools.partial(MLP, submodules=inside(layer.submodules.mlp)))
    assert made.func is MLP and made.keywords["submodules"].linear_fc1 is FusedColumnParallelLinear
