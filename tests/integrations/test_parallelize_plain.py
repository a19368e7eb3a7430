"""Plain torch models through `parallelize`: examples/llama.py, and small modules with a plan of their own."""

from __future__ import annotations

import copy
import pickle
import weakref
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from examples.llama import KVCache, Llama, LlamaConfig
from fused_tp.parallelizing import layers
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import (
    LAYOUTS,
    SIZES,
    assert_near,
    assert_same_calls,
    assert_same_gradients,
    assert_trains_alike,
    copy_of,
    make,
    make_tokens,
    mesh_of,
    on_layouts,
    pair,
)
from tests.reference import refuses
from tests.workers import on_ranks


def test_cache_of_the_example_llama() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2)).double()
    tokens = torch.randint(256, (2, 13))
    cache = KVCache()
    # First tokens, several more, one by one: the three uses of a cache.
    parts = [model(part, cache=cache).logits for part in tokens.split([5, 4, 1, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits)
    positions = torch.arange(13).expand(2, 13)
    assert torch.equal(model(tokens, positions=positions).logits, model(tokens).logits)


@on_layouts("tp2", "cp2_tp2_sp_lossparallel", full=["tp2_sp", "cp2", "cp2_tp2", "ring2_ulysses2"])
def test_example_llama(group: dist.ProcessGroup, layout: str) -> None:
    whole, parallel = pair(group, layout, "plain", tied=True)
    assert parallel.lm_head.weight is parallel.model.embed_tokens.weight
    tokens = make_tokens(2, 13)
    assert torch.equal(parallel.generate(tokens, 4), whole.generate(tokens, 4))
    assert_same_calls(parallel, whole, tokens, tokens)


@on_ranks(4)
def test_copies_of_a_parallel_model_are_parallel(group: dist.ProcessGroup) -> None:
    whole = make("plain")
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 2), sequence_parallel=True)
    tokens = make_tokens(2, 9)
    for one in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        assert_trains_alike(one, copy_of(whole), lambda model: model(tokens, labels=tokens).loss)
        one.zero_grad()  # it has hooks by now
        assert_trains_alike(one.double(), copy_of(whole).double(), lambda model: model(tokens, labels=tokens).loss)
    norm = parallel.model.norm
    norm.compile()  # a copy must not run what was compiled for the original
    assert copy.deepcopy(norm)._compiled_call_impl is None


@on_ranks(2)
def test_whole_weights_are_given_up_layer_by_layer(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    whole = [weakref.ref(layer.weight) for layer in model]
    alive, shard_layer = [], layers.shard_layer

    def counted(*args: Any) -> nn.Module:
        alive.append(sum(weight() is not None for weight in whole))
        return shard_layer(*args)

    with mock.patch.object(layers, "shard_layer", counted):
        parallelize(model, mesh_of(group, 1, 2), plan={str(i): "colwise_gather_output" for i in range(6)})
    assert alive == [6, 5, 4, 3, 2, 1]


def tripled(norm: nn.Module, x: Tensor) -> Tensor:
    return 3.0 * F.rms_norm(x, norm.weight.shape, norm.weight, 1e-6)


@on_ranks(2)
def test_forward_set_on_an_instance_runs(group: dist.ProcessGroup) -> None:
    """Keep a forward set on an instance, as libraries set kernels on modules."""
    whole = make("plain")
    whole.model.norm.forward = partial(tripled, whole.model.norm)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    tokens = make_tokens(2, 9)
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=tokens).loss)


@on_layouts("cp2", full=["cp2_tp2_sp_lossparallel"])  # all features in one graph take long to compile
def test_compiled(group: dist.ProcessGroup, layout: str) -> None:
    whole, parallel = pair(group, layout, "plain", num_hidden_layers=1)
    for module in parallel.modules():  # torch.compile of torch 2.11 uses both
        hooks = module._forward_pre_hooks
        assert list(hooks) == list(dict.keys(hooks))
    eager = copy_of(parallel)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    fast = torch.compile(parallel, backend="aot_eager")
    for seq in (9, 12):
        if seq == 12:  # lengths become symbols; is_causal computed from them is refused by torch
            assert sum(counters["graph_break"].values()) == 0, dict(counters["graph_break"])
        tokens = make_tokens(2, seq)
        losses = [model(tokens, labels=tokens).loss for model in (whole, eager, fast)]
        assert_near(losses[2], losses[0], "loss")
        assert torch.equal(losses[2], losses[1])
        for loss in losses:
            loss.backward()
    assert_same_gradients(parallel, whole)
    assert_same_gradients(parallel, eager)
    with torch.no_grad():
        assert_near(fast(tokens).logits, whole(tokens).logits, "logits")


class Asking(nn.Module):
    """Model that reads tensor values in a loop, which torch.compile cannot trace, and so runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(67, 16), Block(), nn.Linear(16, 67)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for n in range(1, 4):
            if bool((tokens + n > 0).any()):
                x = x * n + n
        return self.head(self.block(x))


@on_ranks(2)
def test_compiled_where_the_model_cannot_be_traced(group: dist.ProcessGroup) -> None:
    whole = Asking()
    torch._dynamo.reset()
    fast = torch.compile(parallelize(copy_of(whole), mesh_of(group, 2, 1)), backend="eager")
    with torch.no_grad():
        for seq in (9, 12):
            tokens = make_tokens(2, seq)
            assert_near(fast(tokens), whole(tokens), "logits")


class Block(nn.Module):
    """Attention without a residual, checkpointed by its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Tagger(nn.Module):
    """Model without embedding and head: features [batch, seq, 16] to scores [batch, seq, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.score = nn.Linear(16, 3)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        if positions is None:
            positions = torch.arange(x.shape[1])
        x = x + positions.unsqueeze(-1).sin()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return {"scores": self.score(x)}


TAGGER_PLAN = {f"blocks.*.w{letter}": "rowwise" if letter == "o" else "colwise" for letter in "qkvo"}


@on_ranks(lambda cp, tp: cp * tp)
@pytest.mark.parametrize(
    ("cp", "tp", "plan"), [(2, 2, TAGGER_PLAN), (2, 1, "auto"), (2, 1, TAGGER_PLAN), (1, 2, TAGGER_PLAN)]
)
def test_a_plan_by_hand_and_attention_that_is_computed_again(
    group: dist.ProcessGroup, cp: int, tp: int, plan: Any
) -> None:
    torch.manual_seed(0)
    whole = Tagger()
    parallel = parallelize(copy_of(whole), mesh_of(group, cp, tp), plan=plan)
    x = torch.randn(2, 11, 16)
    assert_near(parallel(x)["scores"], whole(x)["scores"], "scores")
    assert_trains_alike(parallel, whole, lambda model: model(x)["scores"].square().mean())


@on_ranks(2)
def test_parallel_styles_in_a_plan(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.LayerNorm(8))
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), plan={"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, weights = torch.randn(3, 8), torch.randn(3, 8)
    assert_trains_alike(parallel, whole, lambda model: (model(x) * weights).sum())


class Inside(nn.Module):
    def __init__(self, size: int, other: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, other)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Nested(nn.Module):
    """Model with sharded layers one level deeper than the modules between them, and with parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = Inside(8, 12), nn.PReLU(), Inside(12, 8)
        self.scale, self.gains = nn.Parameter(torch.ones(())), nn.ParameterList([torch.ones(8), torch.ones(8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.gains[1] * self.down(self.scale * self.act(self.up(self.gains[0] * x)))


NESTED_PLAN = {"up.linear": "colwise", "down.linear": "rowwise"}


@on_ranks(2)
def test_what_lies_between_layers_that_are_cut(group: dist.ProcessGroup) -> None:
    mesh, whole, x, weights = mesh_of(group, 1, 2), Nested(), torch.randn(3, 8), torch.randn(3, 8)
    refuses(ValueError, r"'scale' \(\) .*'' as 'repl", parallelize, copy_of(whole), mesh, plan=NESTED_PLAN)
    del whole.scale
    whole.scale = 2.0
    for tensor in (x, weights, *whole.parameters()):
        dist.broadcast(tensor.data, group_src=0, group=group)
    parallel = parallelize(copy_of(whole), mesh, plan=NESTED_PLAN)
    assert_trains_alike(parallel, whole, lambda model: (model(x) * weights).sum())
    model = make("plain")
    model.temperature = nn.Parameter(torch.ones(1))
    refuses(ValueError, r"'temperature' .*'lm_head' is sharded", parallelize, model, mesh, loss_parallel=True)


class Scaled(nn.Module):
    """Model that scales features between sharded layers, or drops features before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain, self.inner = nn.LayerNorm(8), nn.Parameter(torch.ones(1)), nn.Module()
        self.inner.up, self.inner.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropped = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(x), self.dropped)
        return self.inner.down(torch.relu(self.inner.up(x)) * self.gain)


@on_ranks(2)
def test_gradients_that_differ_between_ranks_are_an_error(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    mesh, x, weights = mesh_of(group, 1, 2), torch.randn(3, 8), torch.randn(3, 8)
    plan = {"inner.up": "colwise", "inner.down": "rowwise"}
    keywords: dict[str, Any] = {"plan": plan, "verify": False}  # else the whole model is compared before backward

    def backward(model: nn.Module) -> None:
        (model(x) * weights).sum().backward()

    with pytest.raises(ValueError, match=r"different gradients of 'gain', which .* remove these layers from the plan"):
        backward(parallelize(Scaled(), mesh, **keywords))
    model = Scaled()
    model.gain.requires_grad_(False)
    parallelize(model, mesh, **keywords)
    backward(model)
    if group.rank():
        handle = model.norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(ValueError, match=r"different gradients of 'norm\.weight'"):
        backward(model)
    if group.rank():
        handle.remove()
    model.zero_grad()
    model.dropped = 0.5
    torch.manual_seed(group.rank())
    with pytest.raises(ValueError, match=r"'norm.*drew different dropout"):
        backward(model)


class Routed(nn.Module):
    """Model that routes tokens to the layer of their parity, without modules named experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.ways = nn.Embedding(4, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x, way = self.embed(tokens), (tokens % 2).unsqueeze(-1)
        for number, layer in enumerate(self.ways):
            if (way == number).any():
                x = x + layer(x) * (way == number)
        return x


@on_ranks(2)
def test_layers_that_only_some_cp_ranks_use(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    whole, tokens = Routed(), torch.tensor([[0, 2, 1, 3, 3, 1, 2, 2]])  # in zigzag order a rank sees one parity
    weights = torch.randn(1, 8, 8)
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1))
    for _ in range(4):  # includes later calls, in which ranks do not compare the parameters that they use
        assert_trains_alike(parallel, whole, lambda model: (model(tokens) * weights).sum())


def hooked(of: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if of == "weight":
        model[1].weight.register_hook(lambda grad: 2 * grad)
    elif of == "forward":
        model[0].forward = lambda x: x
    elif of == "_forward_pre_hooks":
        nn.utils.weight_norm(model[0])
    else:
        model[0].register_forward_hook(lambda *_: None)
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.embed(tokens))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight)


@on_ranks(2)
def test_what_would_be_lost_is_refused(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)
    for of in ("weight", "forward", "_forward_pre_hooks", "_forward_hooks"):
        plan = {"0": "colwise", "1": "rowwise"}
        refuses(ValueError, f"{of}.*after parallelize", parallelize, hooked(of), mesh, plan=plan)
    plan = {"embed": "embedding_rowwise"}
    refuses(ValueError, "fails on .*mixed torch.Tensor and DTensor", parallelize, Tied(), mesh, plan=plan)
    tied = parallelize(Tied(), mesh, plan=plan, verify=False)  # logits() might never be called
    refuses(RuntimeError, "mixed torch.Tensor and DTensor", tied, torch.tensor([[1, 2]]))
    renormed = nn.Sequential(nn.Embedding(8, 8, max_norm=1.0), nn.Linear(8, 8))
    refuses(ValueError, "max_norm", parallelize, renormed, mesh, plan={"1": "colwise_gather_output"})


class NoPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Masked(Tagger):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        q = x.unsqueeze(1)
        return {"scores": F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(x.shape[1], x.shape[1]).bool())}


class WholeAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@dataclass
class Scores:
    scores: Tensor


class Unsearchable(Tagger):
    kind: ClassVar[Any]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Any:
        return self.kind(scores=super().forward(x, positions)["scores"])


class Mean(Tagger):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Any:
        scores = super().forward(x, positions)["scores"]
        return {"scores": scores, "mean": scores.mean(1)}


class OtherLoss(Llama):
    keywords: ClassVar[dict[str, Any]] = {}

    def forward(self, tokens: Tensor, labels: Any = None, positions: Any = None, *_: Any, **__: Any) -> Any:
        logits = self.lm_head(self.model(tokens, positions))
        return self.loss_function(logits, labels, self.config.vocab_size, **self.keywords)


class AddedLoss(Llama):
    def forward(self, tokens: Tensor, labels: Any = None, positions: Any = None, *_: Any, **__: Any) -> Any:
        logits = self.lm_head(self.model(tokens, positions))
        return self.loss_function(logits, labels, self.config.vocab_size) + logits.square().mean()


class NestedLoss(Llama):
    def forward(self, tokens: Tensor, labels: Any = None, positions: Any = None, *_: Any, **__: Any) -> Any:
        logits = self.lm_head(self.model(tokens, positions))
        return {"parts": [self.loss_function(logits, labels, self.config.vocab_size), {"logits": logits}]}


@pytest.mark.full
@on_ranks(2)
def test_compiled_losses(group: dist.ProcessGroup) -> None:
    model, tokens = make("plain", num_hidden_layers=1), make_tokens(1, 6)
    model.__class__ = AddedLoss
    parallelize(model, mesh_of(group, 1, 2), loss_parallel=True)
    torch._dynamo.reset()
    refuses(ValueError, "did not return the loss", torch.compile(model, backend="eager"), tokens, labels=tokens)
    model.__class__ = NestedLoss
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    loss = torch.compile(model, backend="eager")(tokens, labels=tokens)["parts"][0]
    assert torch.equal(loss, model(tokens, labels=tokens)["parts"][0])
    assert not counters["graph_break"], dict(counters["graph_break"])
    model = make("plain", num_hidden_layers=1)
    model.__class__ = LossOfItsOwn
    parallel = parallelize(copy_of(model), mesh_of(group, 1, 2), sequence_parallel=True)
    torch._dynamo.reset()
    assert_near(torch.compile(parallel, backend="eager")(tokens), model(tokens), "loss")


class LossOfItsOwn(Llama):
    """Model with a loss of whole logits and, if `of_hidden` is set, of hidden states."""

    of_hidden: ClassVar[float] = 0.0

    def forward(self, tokens: Tensor, labels: Any = None, positions: Any = None, *_: Any, **__: Any) -> Any:
        hidden = self.model(tokens, positions)
        logits = self.lm_head(hidden)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        return loss + self.of_hidden * hidden.square().mean() if self.of_hidden else loss


@on_ranks(2)
def test_a_loss_of_its_own_under_sequence_parallelism(group: dist.ProcessGroup) -> None:
    whole, tokens = make("plain"), make_tokens(2, 9)
    whole.__class__ = LossOfItsOwn
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    assert_trains_alike(parallel, whole, lambda model: model(tokens))
    LossOfItsOwn.of_hidden = 0.1
    try:
        refuses(ValueError, "a scalar computed from hidden states", parallel, tokens)
    finally:
        LossOfItsOwn.of_hidden = 0.0


class Caching(Tagger):
    """Model that returns its cache in an object unknown to pytree, and objects without tensors."""

    in_object = False

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: Any = None) -> Any:
        scores = super().forward(x, positions)["scores"]
        return Scores(scores) if self.in_object else {"s": scores, "cache": cache, "kind": SimpleNamespace(name="it")}


@on_ranks(2)
def test_nothing_is_left_to_one_rank_unseen(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    mesh, x, tokens = mesh_of(group, 2, 1), torch.randn(1, 6, 16), make_tokens(1, 6)
    cache = SimpleNamespace(keys=torch.ones(2))
    model = parallelize(Caching(), mesh)
    assert model(x, cache=cache)["cache"] is cache
    assert model(x)["kind"].name == "it"
    model.in_object = True
    refuses(TypeError, "returned a Scores", model, x, cache=cache)
    for mode in (True, False):
        refuses(ValueError, r"nn\.MultiheadAttention", parallelize(WholeAttention().train(mode), mesh), x)
    for kind in (Scores, SimpleNamespace, type("Own", (dict,), {})):
        Unsearchable.kind = kind
        for length in (6, 1):  # one token is not sharded
            refuses(TypeError, f"returned a {kind.__name__}", parallelize(Unsearchable(), mesh), x[:, :length])
    refuses(ValueError, r"must return tensors .*got \(1, 3\)", parallelize(Mean(), mesh), torch.randn(1, 8, 16))
    model = make("plain")
    model.__class__ = OtherLoss
    parallelize(model, mesh)
    for keywords in ({"ignore_index": 3}, {"label_smoothing": 0.1}, {"weight": torch.ones(67)}):
        OtherLoss.keywords = keywords
        refuses(ValueError, f"loss_function with {next(iter(keywords))}", model, tokens, labels=tokens)


class Pointwise(nn.Module):
    """Convolution of one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv1d(SIZES["hidden_size"], SIZES["hidden_size"], 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


@on_layouts("tp2_sp")
def test_convolution_of_single_tokens(group: dist.ProcessGroup, layout: str) -> None:
    cp, tp, keywords = LAYOUTS[layout]
    whole = make("plain")
    for layer in whole.model.layers:
        layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, Pointwise())
    parallel = parallelize(copy_of(whole), mesh_of(group, cp, tp), verify=True, **keywords)
    tokens = make_tokens(2, 10)
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=tokens).loss)


@on_ranks(2)
def test_refused_with_a_sentence(group: dist.ProcessGroup) -> None:
    cp_mesh, tp_mesh = mesh_of(group, 2, 1), mesh_of(group, 1, 2)
    refuses(ValueError, "`positions` or `position_ids`", parallelize, NoPositions(), cp_mesh)
    refuses(ValueError, "has no tp_plan", parallelize, NoPositions(), tp_mesh)
    with pytest.raises(ValueError, match=r"'score' \(Linear\) has parameters but is not in the plan"):
        parallelize(Tagger(), tp_mesh, plan=TAGGER_PLAN, sequence_parallel=True)
    refuses(ValueError, "exactly one module", parallelize, Tagger(), tp_mesh, plan=TAGGER_PLAN, loss_parallel=True)
    wrapped = nn.parallel.DistributedDataParallel(Tagger(), process_group=group)
    refuses(TypeError, "the model inside", parallelize, wrapped, tp_mesh, plan={"module.score": "colwise_rep"})
    refuses(ValueError, r"on every rank", parallelize, Tagger(), tp_mesh, plan={"score": "colwize"})
    refuses(ValueError, "attn_mask", parallelize(Masked(), cp_mesh), torch.randn(1, 6, 16))
    for mixes in (nn.Conv1d(16, 16, 3), nn.Conv1d(16, 16, 1, stride=2), nn.GRU(16, 16), nn.BatchNorm1d(16)):
        tagger = Tagger()
        tagger.blocks.append(mixes)
        refuses(ValueError, r"'blocks\.2' .* combines tokens", parallelize, tagger, cp_mesh)
    tagger = Tagger()
    parallelize(tagger.blocks, mesh_of(group, 1, 2), plan={"*.wo": "rowwise_split_input"})
    refuses(TypeError, "a submodule of it, is parallel", parallelize, tagger, cp_mesh)
    refuses(TypeError, "a submodule of it, is parallel", parallelize, tagger.blocks[0], cp_mesh)
    model = make("plain", num_key_value_heads=1)
    refuses(ValueError, "these TP sizes: 1", parallelize, model, tp_mesh)


# -- refusals ----------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Model with q, k and v in one layer, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.c_attn, self.out = nn.Embedding(8, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.c_attn(self.embed(x))
        q, k, v = made.split(8, dim=2)
        return self.out(q + k + v)


class Chunked(Packed):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.embed(x)).chunk(3, -1)
        return self.out(q + k + v)


class WithWholeAttention(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.whole(h, h, h, need_weights=False)[0]
        q, k, v = self.c_attn(h).chunk(3, -1)
        return self.out(q + k + v)


class Wrapped(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert callable(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(2)
def test_packed_layers_and_whole_attention(group: dist.ProcessGroup) -> None:
    mesh, ids = mesh_of(group, 1, 2), torch.tensor([[1, 2, 3]])
    plan = {"c_attn": "colwise", "out": "rowwise"}
    packed = {**plan, "c_attn": "packed_colwise_3"}
    for kind, wrong in ((Packed, plan), (Packed, packed), (Chunked, plan)):
        with pytest.raises(ValueError, match=r"splits the output of 'c_attn' by (split|chunk).*packed_colwise_3"):
            parallelize(kind(), mesh, plan=wrong)
    for kind in (Chunked, WithWholeAttention):
        whole = kind()
        parallel = parallelize(copy_of(whole), mesh, plan=packed)
        for model in (whole, parallel):
            model(ids).logsumexp(-1).sum().backward()
        assert_same_gradients(parallel, whole)
    quantized = Chunked()
    quantized.out.weight = nn.Parameter(quantized.out.weight.detach().as_subclass(Wrapped))
    with pytest.raises(
        ValueError, match=r"'out.weight' cannot be converted to a DTensor: it is a Wrapped.*before the model is quant"
    ):
        parallelize(quantized, mesh, plan=packed)
    with pytest.raises(TypeError, match=r"torch.compile\(parallelize"):
        parallelize(torch.compile(Chunked(), backend="eager"), mesh, plan=packed)


@on_layouts("cp2", full=["tp2"])
def test_transforms_of_functions_are_refused(group: dist.ProcessGroup, layout: str) -> None:
    _, parallel = pair(group, layout)
    tokens = make_tokens(2, 8)
    with pytest.raises(RuntimeError, match=r"does not support torch\.func transforms"):
        torch.func.vmap(parallel)(tokens.unsqueeze(1))
    with pytest.raises(RuntimeError, match=r"does not support torch\.func transforms"):
        torch.func.jvp(lambda scale: scale * parallel(tokens), (torch.ones(()),), (torch.ones(()),))
