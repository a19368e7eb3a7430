"""Mixtures of experts over tensor parallel ranks (a shard of every expert) and expert parallel ranks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_tp.nn import gather_state_dict, original_shapes
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.shard_plan import _model_plan, resolve_plan
from fused_tp.parallelizing.state_dict import load_full_state_dict
from fused_tp.parallelizing.whole_blocks import find_blocks
from tests.integrations.models import (
    assert_equal_states,
    assert_near,
    assert_same_calls,
    assert_same_gradients,
    assert_states_travel,
    assert_steps_alike,
    assert_trains_alike,
    assert_trains_checkpointed,
    copy_of,
    make,
    make_tokens,
    mesh_of,
    on_layouts,
    pair,
)
from tests.reference import refuses
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

FAMILIES = [
    "mixtral",
    "gpt_oss",  # gate and up interleaved; biases
    *(pytest.param(family, marks=pytest.mark.full) for family in ("qwen3_moe", "deepseek_v3", "llama4_text")),
]


@on_layouts("tp2", "tp2_sp", full=["tp2_lossparallel", "cp2_tp2", "cp2_tp2_sp_lossparallel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts(group: dist.ProcessGroup, layout: str, family: str) -> None:
    whole, parallel = pair(group, layout, family)
    tokens = make_tokens(2, 9)
    experts = [module for name, module in parallel.named_modules() if name.endswith(".experts")][-1]
    assert all(p.numel() <= 2 * p.to_local().numel() for p in experts.parameters())
    cut = {name for name, p in experts.named_parameters() if not p.placements[0].is_replicate()}
    assert cut >= {"gate_up_proj", "down_proj"}
    assert_same_calls(parallel, whole, tokens, tokens)
    assert_same_calls(parallel, whole, tokens[:, :8], tokens[:, :8])
    if layout.startswith("tp2"):
        made = [model.eval().generate(tokens, max_new_tokens=4, do_sample=False) for model in (whole, parallel)]
        assert torch.equal(*made)


# ep_dim, names and sizes of the mesh, keywords
DEALT: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tp": ("tp", {"tp": 2}, {}),
    "tp_sp": ("tp", {"tp": 2}, {"sequence_parallel": True}),
    "cp": ("cp", {"cp": 2}, {}),
    "ep": ("ep", {"ep": 2}, {}),
    "cp_tp": ("cp", {"cp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}),
    "ep_tp": ("ep", {"ep": 2, "tp": 2}, {}),
    "ep_tp_sp": ("ep", {"ep": 2, "tp": 2}, {"sequence_parallel": True}),
}


def dealt(group: dist.ProcessGroup, layout: str, family: str, **keywords: Any) -> tuple[Any, Any]:
    """A model, and the parallel one with experts distributed over the ranks."""
    ep_dim, sizes, own = DEALT[layout]
    names = tuple(sizes)
    if len(sizes) == 1:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=names)
    else:  # over all ranks of the pool
        mesh = DeviceMesh("cpu", torch.arange(group.size()).view(*sizes.values()), mesh_dim_names=names)
    whole = make(family)
    return whole, parallelize(copy_of(whole), mesh, ep_dim=ep_dim, **{**own, **keywords})


def on_dealt(*layouts: str, full: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    cases = [*layouts, *(pytest.param(name, marks=pytest.mark.full) for name in full)]
    ranks = on_ranks(lambda layout: prod(DEALT[layout][1].values()))
    return lambda fn: pytest.mark.parametrize("layout", cases)(ranks(fn))


@on_dealt("ep", "cp_tp", "tp_sp", full=["tp", "cp", "ep_tp", "ep_tp_sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dealt_out_experts(group: dist.ProcessGroup, layout: str, family: str) -> None:
    whole, parallel = dealt(group, layout, family)
    experts = [module for name, module in parallel.named_modules() if name.endswith(".experts")][-1]
    assert all(2 * p.to_local().shape[0] == p.shape[0] for p in experts.parameters())
    tokens = make_tokens(2, 9)
    assert_same_calls(parallel, whole, tokens, tokens)
    assert_same_calls(parallel, whole, tokens[:, :8], tokens[:, :8])
    made = [model.eval().generate(tokens, max_new_tokens=4, do_sample=False) for model in (whole, parallel)]
    assert torch.equal(*made)
    state, wanted = gather_state_dict(parallel), whole.state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@on_dealt("ep", full=["ep_tp", "ep_tp_sp"])
def test_expert_parallel_ranks_of_other_batches(group: dist.ProcessGroup, layout: str) -> None:
    """Ranks of `ep_dim` have batches of their own, of any size; gradients equal those of the mean loss."""
    whole, parallel = dealt(group, layout, "mixtral")
    batches = [make_tokens(2, 9), make_tokens(1, 4)]
    loss = sum(whole(input_ids=tokens, labels=tokens).loss for tokens in batches) / 2
    loss.backward()
    own = batches[group.rank() * 2 // group.size()]
    parallel(input_ids=own, labels=own).loss.backward()
    assert_same_gradients(parallel, whole)


@on_dealt("cp", full=["ep", "cp_tp"])
def test_what_is_added_to_the_loss_of_dealt_out_experts(group: dist.ProcessGroup, layout: str) -> None:
    """A penalty on parameters, divided by the CP size as usual, counts once for experts, too."""
    whole, parallel = dealt(group, layout, "mixtral")
    tokens = make_tokens(2, 9)

    def penalty(model: nn.Module) -> Tensor:
        whole_ones = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
        return 0.05 * sum((p.square().sum() for p in whole_ones), torch.zeros(()))

    (whole(input_ids=tokens, labels=tokens).loss + penalty(whole)).backward()
    share = 1 if layout == "ep" else 2
    (parallel(input_ids=tokens, labels=tokens).loss + penalty(parallel) / share).backward()
    assert_same_gradients(parallel, whole)


@on_dealt("ep", "ep_tp", full=["cp"])
def test_copies_and_steps_of_dealt_out_experts(group: dist.ProcessGroup, layout: str) -> None:
    whole, parallel = dealt(group, layout, "mixtral")
    parallel = copy.deepcopy(parallel)
    tokens = make_tokens(2, 9)
    for model in (whole, parallel):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=not layout.endswith("tp"))
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            if not layout.endswith("tp"):  # in ep_tp experts are on a mesh of two dims, other parameters on one
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_near(parallel(input_ids=tokens).logits, whole(input_ids=tokens).logits, "logits")


@pytest.mark.full
@pytest.mark.parametrize("name", ["ep", "cp"])
@on_ranks(4)
def test_fsdp_over_dealt_out_experts(group: dist.ProcessGroup, name: str) -> None:
    """Shard experts over the ranks of dp, and all other parameters over all ranks."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", name))
    whole = make("mixtral")
    parallel = parallelize(copy_of(whole), mesh, ep_dim=name, grad_sync=False)
    for layer in parallel.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp", name])
    tokens = make_tokens(2, 9)
    assert_trains_alike(parallel, whole, lambda model: model(input_ids=tokens, labels=tokens).loss)
    torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)


@on_ranks(2)
def test_plans_that_deal_experts_out(group: dist.ProcessGroup) -> None:
    """Distribute experts by a plan of one's own, in the styles of transformers."""
    tokens = make_tokens(2, 9)
    for name in ("ep", "tp"):
        whole = make("qwen3_moe")
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
        experts = dict(whole.ep_plan)
        parallel = parallelize(copy_of(whole), mesh, ep_dim=name, plan=experts)
        assert_same_calls(parallel, whole, tokens, tokens)
        refuses(ValueError, "Pass ep_dim=", parallelize, copy_of(whole), mesh_of(group, 1, 2), plan=experts)
    # Plan entries of other modules (norms of heads, sinks) apply to tensor parallel ranks only.
    for family in ("qwen3_moe", "gpt_oss"):
        whole = make(family)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
        parallel = parallelize(copy_of(whole), mesh, ep_dim="ep", plan=dict(_model_plan(whole)))
        assert_same_calls(parallel, whole, tokens, tokens)


@on_layouts("tp2_lossparallel", "tp2_sp", full=["tp2"])
def test_losses_of_routers(group: dist.ProcessGroup, layout: str) -> None:
    whole, parallel = pair(group, layout, "mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    tokens = make_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0  # the loss of routers ignores these tokens
    for asked in ({}, {"attention_mask": mask}):

        def call(model: Any, asked: Any = asked, **more: Any) -> Any:
            torch.manual_seed(3)
            return model(input_ids=tokens, labels=tokens, **asked, **more)

        parallel.zero_grad(), whole.zero_grad()
        assert_trains_alike(parallel, whole, lambda model: call(model).loss)
        made, wanted = call(parallel), call(whole)
        assert_near(made.aux_loss, wanted.aux_loss, "loss of routers")
        for found, right in zip(made.router_logits, wanted.router_logits, strict=True):
            assert_near(found, right, "router logits")
        if "lossparallel" not in layout:  # with it each rank has logits of its vocabulary shard
            made, wanted = (call(model, return_dict=False, logits_to_keep=9) for model in (parallel, whole))
            for found, right in zip(made[:3], wanted[:3], strict=True):
                assert_near(found, right, "both losses, and logits")


class Twice(nn.Module):
    """A router, and a block that receives two tensors sharded along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.up, self.down = nn.Linear(8, 2), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.down(self.up(x)) * self.router(x)[..., :1]


class Direct(nn.Module):
    """A layer with its linear layers as direct children."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.up(x) * self.gate(x)


class Stack(nn.Module):
    def __init__(self, *, two_streams: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers, self.head = (
            nn.Embedding(11, 8),
            nn.ModuleList([nn.ModuleList([Twice()]) if two_streams else Direct()]),
            nn.Linear(8, 11),
        )

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        layer = self.layers[0]
        return self.head((layer[0] if isinstance(layer, nn.ModuleList) else layer)(x, x + 0))


@on_ranks(2)
def test_a_layer_of_whole_sequences_right_below_a_layer(group: dist.ProcessGroup) -> None:
    plan = {"layers.*.up": "rowwise_split_input", "head": "colwise_gather_output"}
    whole = Stack(two_streams=False)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), plan=plan, sequence_parallel=True)
    for length in (1, 2, 5):  # with one token a rank has none
        tokens = torch.arange(length)[None]
        assert_near(parallel(tokens), whole(tokens), "logits")
        assert_trains_alike(parallel, whole, lambda model, tokens=tokens: model(tokens).square().mean())


class OneBlock(nn.Module):
    """A block of experts with tokens sharded over sequence parallel ranks, and an output layer."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": make(family).model.layers[0].mlp})])
        self.head = nn.Linear(32, 11)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.head(self.layers[0]["mlp"](tokens))


BLOCK_PLAN = {
    "layers.*.mlp.experts": "moe_tp_experts",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "head": "colwise_gather_output",
}
SHARED_PLAN = {
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}


class Ops(TorchDispatchMode):
    """Count the ops of fused_tp that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fused_tp":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


# Ops of (forward, backward). Those of the output layer and its features, and of the sharded input:
ENDS = ("all_gather_matmul all_gather", "all_gather_matmul_backward all_gather")
ON_OWN_TOKENS = (
    "all_gather all_gather_grouped_matmul grouped_matmul_reduce_scatter",  # the first gathers the routing
    # The reduce_scatter is of gradients of routing weights, the all_reduce of the router's gradients.
    "grouped_matmul_reduce_scatter_backward grouped_matmul_backward all_gather_grouped_matmul_backward reduce_scatter "
    "all_reduce",
)
ON_ALL_TOKENS = (
    "all_gather column_parallel_grouped_matmul grouped_matmul_all_reduce",
    "all_gather grouped_matmul_backward column_parallel_grouped_matmul_backward all_reduce",
)
# Those of a shared expert with a gate.
SHARED_ON_OWN_TOKENS = (
    "all_gather_matmul matmul_reduce_scatter",
    "matmul_reduce_scatter_backward all_gather_matmul_backward all_reduce",
)
SHARED_ON_ALL_TOKENS = ("column_parallel_matmul matmul_all_reduce", "column_parallel_matmul_backward")


@on_ranks(2)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_what_a_block_sends(group: dist.ProcessGroup, family: str) -> None:
    """A block on own tokens gathers and reduce-scatters hidden states; only gradients of routers and gates are
    all-reduced. A block with a hook runs on all tokens."""
    for hooked, block, shared in (
        (False, ON_OWN_TOKENS, SHARED_ON_OWN_TOKENS),
        (True, ON_ALL_TOKENS, SHARED_ON_ALL_TOKENS),
    ):
        whole, plan, ops = OneBlock(family), BLOCK_PLAN, [ENDS, block]
        if family == "qwen3_next":
            plan, ops = plan | SHARED_PLAN, [*ops, shared]
        model = copy_of(whole)
        if hooked:
            model.get_submodule("layers.0.mlp").register_forward_hook(lambda block, args, output: None)
        parallelize(model, mesh_of(group, 1, 2), plan=plan, sequence_parallel=True, verify=False)
        x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with Ops() as forward:
            y = model(inputs[0])
        with Ops() as backward:
            y.square().sum().backward()
        for step, found in enumerate((forward, backward)):
            assert found.counts == Counter(name for one in ops for name in one[step].split()), (hooked, step)
        whole(inputs[1]).square().sum().backward()
        assert_near(inputs[0].grad, inputs[1].grad, "gradient of the input")
        assert_same_gradients(model, whole)


@on_ranks(2)
def test_blocks_under_autocast(group: dist.ProcessGroup) -> None:
    for family in ("mixtral", "gpt_oss"):
        whole = make(family)
        parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
        tokens = make_tokens(2, 9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [model(input_ids=tokens, labels=tokens).loss for model in (parallel, whole)]
        for loss in losses:
            loss.backward()
        # Relative to the largest element: each model rounds to bfloat16 (2^-9) at every layer, in another order.
        assert_near(*losses, "loss", 1e-2)
        for name, p in whole.named_parameters():
            if name.endswith(("router.weight", "gate.weight")):
                assert_near(parallel.get_parameter(name).grad, p.grad, f"gradient of {name}", 5e-2)


class OwnRouter(nn.Module):
    """Module that replaces a model's router and computes the same."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight, self.like = router.weight, [router]

    def forward(self, x: Tensor) -> Any:
        return self.like[0](x)


def test_which_blocks_run_on_own_tokens() -> None:
    """Blocks with known, unmodified code run on own tokens, unless rows travel to experts on other ranks."""
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    class OwnBlock(MixtralSparseMoeBlock):
        pass

    def blocks(change: Callable[[Any], Any] | None = None, family: str = "mixtral", **how: bool) -> list[list[str]]:
        model = make(family)
        if change is not None:
            change(model.model.layers[0].mlp)
        found = find_blocks(model, resolve_plan(model, "auto"), **{"exchanges_expert_rows": False, **how})
        return [[name for name in names if name.endswith("mlp")] for names in found]

    first, second = "model.layers.0.mlp", "model.layers.1.mlp"
    for family in ("mixtral", "gpt_oss", "qwen3_moe"):
        assert blocks(family=family) == [[], [first, second]]
    assert blocks(family="llama") == [[], []]
    changes: list[Callable[[Any], Any]] = [
        lambda block: setattr(block, "__class__", OwnBlock),
        lambda block: setattr(block, "gate", OwnRouter(block.gate)),
        lambda block: setattr(block, "forward", block.forward),
        lambda block: block.gate.register_forward_hook(lambda router, args, output: None),
        lambda block: block.register_forward_pre_hook(lambda block, args: None),
        lambda block: setattr(block.experts, "act_fn", nn.LSTM(4, 4)),
        lambda block: setattr(block, "jitter_noise", 0.1),
    ]
    for change in changes:
        assert blocks(change) == [[first], [second]]
    recorded = make("mixtral")
    recorded(input_ids=make_tokens(1, 3), output_router_logits=True)  # hooks that only keep what routers return
    assert recorded.model.layers[0].mlp.gate._forward_hooks
    assert find_blocks(recorded, resolve_plan(recorded, "auto"), exchanges_expert_rows=False) == ([], [first, second])
    assert blocks(exchanges_expert_rows=True) == [[first, second], []]
    assert blocks(family="llama4_text")[1] == []


@on_ranks(2)
def test_noise_on_tokens(group: dist.ProcessGroup) -> None:
    """Noise equals that of the whole model; ranks end with equal random states, though one has fewer tokens."""
    losses = {"output_router_logits": True, "router_aux_loss_coef": 0.1}  # of routers, which run on the whole sequence
    whole, parallel = pair(group, "tp2_sp", "mixtral", router_jitter_noise=0.1, **losses)
    tokens = make_tokens(2, 9)

    def loss_of(model: Any) -> Tensor:
        torch.manual_seed(3)
        loss: Tensor = model(tokens, labels=tokens).loss
        return loss

    assert_trains_alike(parallel, whole, loss_of)
    loss_of(whole)
    state = torch.get_rng_state()
    loss_of(parallel)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.full
@on_ranks(3)
def test_experts_over_three_ranks(group: dist.ProcessGroup) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 48}
    whole = make("mixtral", **sizes)
    for keywords in ({}, {"sequence_parallel": True}):
        parallel = parallelize(copy_of(whole), mesh_of(group, 1, 3), **keywords)
        for length in (1, 2, 7):
            tokens = make_tokens(2, length)
            weights = torch.randn(2, length, 67, generator=torch.Generator().manual_seed(length))
            for model in (whole, parallel):
                model.zero_grad()
                (model(input_ids=tokens).logits * weights).sum().backward()
            assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_a_block_of_two_streams_is_refused(group: dist.ProcessGroup) -> None:
    plan = {"layers.*.*.up": "colwise", "layers.*.*.down": "rowwise", "head": "colwise_gather_output"}
    model = parallelize(Stack(), mesh_of(group, 1, 2), plan=plan, sequence_parallel=True)
    refuses(ValueError, "two of its arguments", model, torch.tensor([[1, 2]]))


@on_ranks(2)
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("mixtral", marks=pytest.mark.full)])
def test_blocks_checkpointed(group: dist.ProcessGroup, family: str) -> None:
    """Backward recomputes blocks, on own tokens and on whole sequences, after a forward pass of another length."""
    whole = make(family)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    assert_trains_checkpointed(parallel, whole)


@on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_experts(group: dist.ProcessGroup, family: str, tmp_path: Path) -> None:
    import transformers

    whole = make(family)
    assert_states_travel(group, whole, tmp_path / "plain")
    state = whole.state_dict()
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    other = {name: t.transpose(-1, -2) if "down_proj" in name else t for name, t in state.items()}
    refuses(ValueError, r"down_proj.* must have shape", load_full_state_dict, parallel, other)
    apply_activation_checkpointing(parallel)  # its wrappers add names that no state dict has
    assert_equal_states(gather_state_dict(parallel), state)
    parallel.save_pretrained(tmp_path)
    dist.barrier(group)
    assert_equal_states(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), state)


@on_ranks(2)
def test_checkpoints_of_experts(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """Save and load a model and its optimizer; the loaded run continues like the saved one."""
    mesh, tokens = mesh_of(group, 1, 2), make_tokens(2, 9)
    states = []
    for loads in (False, True):
        model = parallelize(make("mixtral", attention_dropout=0.0), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, tokens)
        if loads:  # into other weights and other moments
            step(model, optimizer, tokens.flip(1))
        saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        (dcp.load if loads else dcp.save)(saved, checkpoint_id=tmp_path, process_group=group)
        step(model, optimizer, tokens)
        states.append(gather_state_dict(model))
    assert_equal_states(*states)


CHECKPOINTS = [  # (TP size that saves, TP size that loads) of four ranks; FSDP2 shards over the rest
    (2, 1),
    *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((1, 2), (4, 2), (1, 4), (2, 4), (1, 1))),
]


@on_ranks(4)
@pytest.mark.parametrize(("saves", "loads"), CHECKPOINTS)
@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_checkpoints_of_experts_at_other_sizes(
    group: dist.ProcessGroup, family: str, saves: int, loads: int, tmp_path: Path
) -> None:
    """Load a model and its optimizer at another TP size, also from or into a model that is not parallel."""
    states = []
    for ranks, does in ((saves, dcp.save), (loads, dcp.load)):
        model, mine = at_size(family, ranks), range(4) if ranks > 1 else range(dist.get_rank(), dist.get_rank() + 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = make_tokens(2, 9)
        for given in (tokens, tokens.flip(1))[: 1 if does is dcp.save else 2]:  # other weights and moments than saved
            train(model, optimizer, given)
        options = StateDictOptions(flatten_optimizer_state_dict=saves == 4)
        state: dict[str, Any] = {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        shapes = {name: list(p.shape) for name, p in make(family, num_key_value_heads=4).named_parameters()}
        seen = original_shapes(model, state)
        assert all(list(t.shape) == shapes[name] for name, t in seen["model"].items())
        if len(mine) > 1 or does is dcp.load or dist.get_rank() == 0:
            does(seen, checkpoint_id=tmp_path, no_dist=len(mine) == 1)
        dist.barrier(group)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        train(model, optimizer, tokens)
        states.append(gather_state_dict(model))
    assert states[0].keys() == states[1].keys()
    for name, t in states[0].items():
        assert_near(states[1][name], t, name, 1e-3)  # Adam amplifies a difference in the last bit


def at_size(family: str, ranks: int) -> Any:
    """A model over `ranks` tensor parallel ranks of four; unsharded for one."""
    model = make(family, attention_dropout=0.0, num_key_value_heads=4)
    if ranks == 1:
        return model
    mesh = DeviceMesh("cpu", torch.arange(4).view(4 // ranks, ranks), mesh_dim_names=("dp", "tp"))
    model = parallelize(model, mesh)
    if ranks < 4:
        fully_shard(model, mesh=mesh["dp"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor) and norm.full_tensor() > 0
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.full
@on_ranks(4)
def test_fsdp_over_experts(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    whole, batches = make("mixtral"), [make_tokens(2, 9), make_tokens(2, 9).flip(1)]
    parallel = parallelize(copy_of(whole), mesh, sequence_parallel=True)
    for layer in parallel.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp"])
    assert_steps_alike(parallel, whole, mesh, batches)


@on_ranks(2)
def test_experts_that_are_not_served(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)
    plan = dict(make("mixtral").tp_plan)
    experts = "model.layers.*.mlp.experts"
    without = {name: style for name, style in plan.items() if name != f"{experts}.down_proj"}
    refuses(
        ValueError,
        r"its 'down_proj' is not in the plan",
        parallelize,
        make("mixtral"),
        mesh,
        plan=without,
    )
    without = {name: style for name, style in plan.items() if name != experts}
    says = "for parameters of modules with the styles .*moe_tp_experts"
    refuses(ValueError, says, parallelize, make("mixtral"), mesh, plan=without)
    model = make("mixtral")
    model.model.layers[1].mlp.experts.norm = nn.LayerNorm(32)
    refuses(ValueError, r"layers\.1.*its 'norm.bias' is not in the plan", parallelize, model, mesh)
