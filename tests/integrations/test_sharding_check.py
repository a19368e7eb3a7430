"""`parallelize(verify=...)` refuses user code that a sharded model would compute wrongly, before the first step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fused_tp
from fused_tp.parallelizing.checks import model_check, sharding_check
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import SIZES, make, make_tokens, mesh_of
from tests.workers import on_ranks

WRONG = "does not match the unsharded model"


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the log lines of this package, once-only ones too, even if logging is disabled (by a sweep of types)."""
    model_check._warned_keys.clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logging.getLogger("fused_tp").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("fused_tp").removeHandler(handler)
        logging.disable(disabled)


def test_fast_linear_layers_of_the_unsharded_model() -> None:
    """Layers with torch's forward are computed by the kernels for few rows, in the context only."""

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    torch.manual_seed(0)
    plain, subclass, patched = nn.Linear(512, 512), Doubled(512, 512), nn.Linear(512, 512, bias=False)
    model, x = nn.ModuleList([plain, subclass, patched]), torch.randn(4, 512)
    patched.forward = lambda input: 3 * input  # type: ignore[method-assign]
    with torch.no_grad():
        expected = [layer(input=x) for layer in model]
        with (
            mock.patch.object(sharding_check, "linear", wraps=sharding_check.linear) as kernel,
            sharding_check._fast_linears(model),
        ):
            found = [layer(input=x) for layer in model]
    assert kernel.call_count == 1
    torch.testing.assert_close(found, expected)
    with torch.no_grad(), sharding_check._fast_linears(model):
        torch.testing.assert_close(torch.vmap(plain)(x), expected[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert plain(x).dtype is torch.bfloat16
    assert "forward" not in vars(plain) and "forward" not in vars(subclass) and "forward" in vars(patched)


# -- plain models ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and an MLP with layers that can be sharded, and places for user code."""

    def __init__(self, between: Callable[..., Tensor] | None = None, tokens: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(37, 32), nn.Linear(32, 37)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.between, self.tokens = between, tokens

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        if self.tokens is not None:
            x = x + self.tokens(x)
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        up = F.silu(self.up(x))
        return self.head(x + self.down(up if self.between is None else self.between(up)))


PLAN = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "up"), "colwise"),
    **dict.fromkeys(("o_proj", "down"), "rowwise"),
    "head": "colwise_gather_output",
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {  # over features, which are sharded over tensor parallel ranks
    "softmax": lambda x: x * x.softmax(-1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "chunk": lambda x: torch.cat([x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * torch.arange(x.shape[-1]),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "topk": lambda x: torch.where(x >= x.topk(5, -1).values[..., -1:], x, 0.0),
    "roll": lambda x: x.roll(1, -1) * (torch.arange(x.shape[-1]) < 9),
}
TOKENS: dict[str, Callable[[Tensor], Tensor]] = {  # over tokens, which are sharded over context parallel ranks
    "shift": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "mean": lambda x: x.mean(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1) / 8,
    "roll": lambda x: 0.1 * x.roll(1, 1),
    "batched matmul": lambda x: 0.1 * (x @ x.mT).tril() @ x,
}


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def by_aten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, is_causal=True)


@on_ranks(2)
def test_plain_models(group: dist.ProcessGroup) -> None:
    tp, cp = mesh_of(group, 1, 2)["tp"], mesh_of(group, 2, 1)["cp"]
    for between in BETWEEN.values():
        with pytest.raises(ValueError, match=WRONG):
            parallelize(Block(between=between), tp, plan=PLAN)
    for tokens in TOKENS.values():
        parallelize(Block(tokens=tokens), tp, plan=PLAN)
        with pytest.raises(ValueError, match=WRONG):
            parallelize(Block(tokens=tokens), cp, plan=PLAN)
    for attend in (by_hand, by_aten):
        model = Block()
        model.attend = attend
        with pytest.raises(ValueError, match=f"{WRONG}.*'o_proj'"):
            parallelize(model, cp, plan=PLAN)
    # A parameter of 0 hides the branch that it gates. A hook is checked like a forward.
    gated = Block()
    gated.gate = nn.Parameter(torch.zeros(32))
    gated.tokens = lambda x: gated.gate * x.mean(1, keepdim=True)
    with pytest.raises(ValueError, match=WRONG):
        parallelize(gated, cp, plan=PLAN)
    hooked = Block(between=nn.Identity())
    hooked.between.register_forward_hook(lambda module, args, output: output - output.mean(-1, keepdim=True))
    with pytest.raises(ValueError, match=WRONG):
        parallelize(hooked, tp, plan=PLAN)


RARE: dict[str, Callable[[Tensor], Tensor]] = {  # over tokens, without effect on the tokens of the comparison
    "a slice": lambda x: 0 * x + (x[:, :1] > 9) * F.pad(x[:, 1:] * x[:, :-1] > 9, (0, 0, 1, 0)),
    "cumsum": lambda x: x * (x > 9).cumsum(1),
    "roll": lambda x: x * (x > 9).roll(shifts=(1, 1), dims=(0, -2)),
    "sort": lambda x: x * (x > 9).int().sort(dim=1).values,
    "mean": lambda x: x * (1 + (x > 9).float().mean(1, keepdim=True)),
    "any": lambda x: x * ~(x > 9).any(dim=(0, 1)),
    "max": lambda x: x * torch.where((x > 9).int().max() > 0, 2.0, 1.0),
    "diff": lambda x: x * F.pad((x > 9).int().diff(dim=1), (0, 0, 1, 0)),
}


@on_ranks(2)
def test_functions_that_combine_tokens_only_in_rare_batches(group: dist.ProcessGroup) -> None:
    tp, cp = mesh_of(group, 1, 2)["tp"], mesh_of(group, 2, 1)["cp"]
    for name, tokens in {**RARE, "none": lambda x: x.sort(-1).values.cumsum(-1)[:, :, :4].mean(-1, True)}.items():
        for mesh, is_found in ((tp, False), (cp, name != "none" and dist.get_rank(group) == 0)):
            with log_lines() as lines:
                parallelize(Block(tokens=tokens), mesh, plan=PLAN)
            found = [line for line in lines if "by other means than attention" in line]
            assert bool(found) == is_found, (name, mesh, lines)
            assert not found or (f"{name}" in found[0] and "test_sharding_check.py:" in found[0]), found


# -- transformers ------------------------------------------------------------------------------------------------------


def own_forward(self: Any, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> tuple[Tensor, None]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    k, v = (x.repeat_interleave(self.num_key_value_groups, 1) for x in (k, v))
    return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)), None


def biased(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float = 1.0, **_: Any) -> Any:
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    places = torch.arange(q.shape[2])
    scores = q @ k.mT * scaling - (places[:, None] - places).abs()
    weights = scores.masked_fill(places[:, None] < places, -1e9).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), None


def llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes}))


def patch_instance(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = own_forward.__get__(attention)


def patch_class(model: Any) -> None:
    kind = type(model.model.layers[0].self_attn)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("PatchedAttention", (kind,), {"forward": own_forward})


def add_convolution(model: Any) -> None:
    convolution = nn.Conv1d(32, 32, 3, padding=2)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + convolution(output.mT)[..., :-2].mT

    model.model.embed_tokens.register_forward_hook(hook)


@on_ranks(2)
def test_transformers_models_over_context_parallel_ranks(group: dist.ProcessGroup) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    cp, tokens = mesh_of(group, 2, 1)["cp"], make_tokens(2, 12)
    for change in (patch_instance, patch_class, add_convolution):
        model = llama()
        change(model)
        with pytest.raises(ValueError, match=WRONG):
            parallelize(model, cp)
    ALL_ATTENTION_FUNCTIONS.register("biased", biased)
    ALL_MASK_ATTENTION_FUNCTIONS.register("biased", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    with pytest.raises(ValueError, match=WRONG):
        parallelize(llama(attn_implementation="biased"), cp)
    with mock.patch.object(modeling_llama, "eager_attention_forward", biased), pytest.raises(ValueError, match=WRONG):
        parallelize(llama(attn_implementation="eager"), cp)
    model, original_attention = parallelize(llama(), cp), ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", lambda *args, **keywords: original_attention(*args, **keywords))
    with pytest.raises(ValueError, match="Another function was registered in ALL_ATTENTION_FUNCTIONS"):
        model(input_ids=tokens)
    ALL_ATTENTION_FUNCTIONS.register("sdpa", original_attention)
    # A change after parallelize is refused, also if verify=False compared nothing.
    for change in (patch_instance, patch_class):
        for verify in ("auto", False):
            model = parallelize(llama(), cp, verify=verify)
            model(input_ids=tokens, labels=tokens).loss.backward()
            change(model)
            with pytest.raises(ValueError, match="called attention over the context parallel ranks"):
                model(input_ids=tokens, labels=tokens)


@on_ranks(2)
def test_what_acts_in_training_and_what_changes_later(group: dist.ProcessGroup) -> None:
    cp, tp = mesh_of(group, 2, 1)["cp"], mesh_of(group, 1, 2)["tp"]
    model = Block()
    model.tokens = lambda x: x.mean(1, keepdim=True) * model.training
    with pytest.raises(ValueError, match=WRONG):
        parallelize(model, cp, plan=PLAN)
    # With dropout the comparison in training mode is skipped: a rank's shard drops other elements.
    model = Block(between=nn.Dropout(0.5))
    parallelize(model, tp, plan=PLAN, verify=True)
    model = Block(between=nn.Dropout(0.5))
    parallelize(model, tp, plan=PLAN, verify=False)
    with log_lines() as lines:
        tokens = make_tokens(2, 12) % 37
        model(tokens)
        assert not lines
        model.embed.register_forward_hook(lambda module, args, output: output)
        model.attend = by_hand
        model.between = nn.Identity()
        model(tokens)
    changed = " ".join(lines)
    if dist.get_rank(group) == 0:
        assert "'embed'" in changed and "attribute 'attend'" in changed and "'between' (Identity)" in changed, lines
    assert len(lines) == (3 if dist.get_rank(group) == 0 else 0), lines


# -- side effects ------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Model that draws random numbers and counts calls in a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(37, 32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: int = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        x = self.embed(tokens) + torch.randn(32)
        return F.dropout(self.down(self.up(x).relu()), 0.5, self.training)


@on_ranks(2)
def test_nothing_is_left_behind(group: dist.ProcessGroup) -> None:
    tp = mesh_of(group, 1, 2)["tp"]
    torch.manual_seed(3)
    model = Counting()
    nn.init.zeros_(model.up.bias)
    nn.init.ones_(model.down.bias)
    kept, bias = copy.deepcopy(model), model.down.bias
    model.up.eval()
    torch.manual_seed(5)
    parallelize(model, tp, plan={"up": "colwise", "down": "rowwise"}, verify=True)
    state = fused_tp.nn.gather_state_dict(model)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    for name, value in kept.state_dict().items():
        assert torch.equal(state[name], value), name
    assert torch.equal(bias, kept.down.bias)  # the caller may hold it
    assert model.training and not model.up.training
    # The check ran the sharded model once and restored its buffer.
    assert int(model.calls) == 0


@on_ranks(2)
def test_the_comparison_may_be_left_out(group: dist.ProcessGroup) -> None:
    tp, plan = mesh_of(group, 1, 2)["tp"], {"up": "colwise", "down": "rowwise"}
    with log_lines() as lines:
        for _ in range(2):
            with torch.device("meta"):
                model = Counting()
            parallelize(model, tp, plan=plan)
    found = [line for line in lines if "has no values yet (meta device)" in line]
    assert len(found) == 2 * (dist.get_rank(group) == 0), lines  # one for each model
    with torch.device("meta"):
        model = Counting()
    with pytest.raises(ValueError, match=r"verify=True.*no values yet"):
        parallelize(model, tp, plan=plan, verify=True)
    with pytest.raises(
        ValueError, match="verify must be 'auto', True, False or a dict of arguments of forward, got 'yes'"
    ):
        parallelize(Counting(), tp, plan=plan, verify="yes")
    parallelize(Block(between=BETWEEN["softmax"]), tp, plan=PLAN, verify=False)
    with pytest.raises(ValueError, match=r"fails on .* on which the unsharded model runs: .*24"):
        parallelize(Block(), tp, plan={"down": "rowwise"})  # an op refuses its input: all features, not a shard
    with pytest.raises(ValueError, match=r"verify=a batch.*KeyError|verify=a batch.*got an unexpected"):
        parallelize(Counting(), tp, plan=plan, verify={"nothing": 1})
    parallelize(Counting(), tp, plan=plan, verify={"tokens": torch.zeros(1, 4, dtype=torch.long)})


@on_ranks(2)
def test_bf16_and_experts(group: dist.ProcessGroup) -> None:
    """Rounding selects other experts for some tokens: the check raises no false alarm and finds a wrong model."""
    pytest.importorskip("transformers")
    cp = mesh_of(group, 2, 1)["cp"]
    parallelize(make("qwen3_moe", eos_token_id=[1, 2]).bfloat16(), cp, verify=True)
    model = make("qwen3_moe").bfloat16()
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
    with pytest.raises(ValueError, match=WRONG):
        parallelize(model, cp)


class Autocast(Block):
    """A model whose forward enters autocast and returns fp32, like models that Accelerate has prepared."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens, positions).float()


@on_ranks(2)
def test_autocast(group: dist.ProcessGroup) -> None:
    """Autocast in forward or around `parallelize` causes no false alarm, at once or in the first step."""
    tp, tokens = mesh_of(group, 1, 2)["tp"], make_tokens(2, 8) % 37
    model = parallelize(Autocast(), tp, plan=PLAN, verify=True)
    model(tokens).square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        model = parallelize(Block(), tp, plan=PLAN, verify=True)
        model(tokens).square().mean().backward()
    with pytest.raises(ValueError, match=WRONG):
        parallelize(Autocast(between=lambda up: 3 + 9 * up.mean(-1, keepdim=True) + up), tp, plan=PLAN)


@on_ranks(2)
def test_rounding_that_a_model_amplifies(group: dist.ProcessGroup) -> None:
    """Rounding in 16 bit is measured on the sharded model if its output is off by more than the bound of the dtype."""
    tp = mesh_of(group, 1, 2)["tp"]

    def amplifier() -> nn.Module:
        model = Block().bfloat16()
        model.register_forward_hook(lambda module, args, output: (25 * output).sin())
        return model

    with mock.patch.object(sharding_check, "has_16_bit_parameters", return_value=False):  # as in a large model
        parallelize(amplifier(), tp, plan=PLAN, verify=True)
        with mock.patch.object(sharding_check, "ROUNDING_FACTOR", 0.0), pytest.raises(ValueError, match=WRONG):
            parallelize(amplifier(), tp, plan=PLAN)


@on_ranks(2)
def test_small_models_of_16_bits_are_compared_in_fp32(group: dist.ProcessGroup) -> None:
    """Errors below the rounding of 16 bits are found, and parameters are the callers' own again."""
    cp, tp = mesh_of(group, 2, 1)["cp"], mesh_of(group, 1, 2)["tp"]
    for dtype in (torch.bfloat16, torch.float16):
        model = Block(tokens=lambda x: 0.002 * x.roll(1, 1)).to(dtype)
        before = {name: id(p) for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=r"above the rounding bound 0\.0001"):
            parallelize(model, cp, plan=dict.fromkeys(PLAN, "colwise"))
        assert {name: id(p) for name, p in model.named_parameters()} == before
        model = parallelize(Block().to(dtype), tp, plan=PLAN, verify=True)
        assert {p.dtype for p in model.parameters()} == {dtype}

    class Casts(Block):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().attend(*(t.bfloat16() for t in (q, k, v))).to(q.dtype)

    parallelize(Casts().bfloat16(), tp, plan=PLAN, verify=True)  # compared in 16 bits only

    class Mixes16Bits(Block):
        """Model whose 16-bit weights take another way, which mixes tokens."""

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().attend(q, k, v) if q.dtype == torch.float32 else v.roll(1, 2)

    with pytest.raises(ValueError, match=WRONG):
        parallelize(Mixes16Bits().bfloat16(), cp, plan=dict.fromkeys(PLAN, "colwise"))


@on_ranks(2)
def test_random_numbers_in_training(group: dist.ProcessGroup) -> None:
    """A model that draws random numbers is compared in eval mode, and a log line says so."""
    tp = mesh_of(group, 1, 2)["tp"]
    with log_lines() as lines:
        model = Block(tokens=lambda x: 0.0 * torch.randn_like(x))
        parallelize(model, tp, plan=PLAN, verify=True)
        assert (group.rank() == 0) == any("because it draws random numbers in training mode" in line for line in lines)


@on_ranks(2)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_norm", 1.0, "has max_norm=1: its forward scales the rows of its tokens"),
        ("sparse", True, "has sparse=True, but parallelize and its comparison support dense gradients only"),
        ("scale_grad_by_freq", True, "it would count the tokens of one rank instead of all"),
    ],
)
def test_embeddings_that_depend_on_all_tokens(
    group: dist.ProcessGroup, option: str, value: object, message: str
) -> None:
    model = Block()
    setattr(model.embed, option, value)
    with pytest.raises(ValueError, match=message):
        parallelize(model, mesh_of(group, 2, 1)["cp"], plan=dict.fromkeys(PLAN, "colwise"))


@on_ranks(2)
def test_pipelines(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    for dtype in (torch.float32, torch.bfloat16):  # stages send tensors of this dtype
        assert fused_tp.pipeline(llama().to(dtype), mesh, microbatches=2, verify=True) is not None

    class Remembers(nn.Module):
        """Model with a second layer that reads an attribute set by the first, on another stage."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(37, 16)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.head = nn.Linear(16, 37)
            self.first = 1.0

        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
            x = self.embed(tokens)
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number == 0:
                    self.first = float(x.detach().abs().mean())
            return self.head(x * self.first)

    with pytest.raises(ValueError, match=WRONG):
        fused_tp.pipeline(Remembers(), mesh, microbatches=2, loss_fn=lambda out, labels: out.mean())
