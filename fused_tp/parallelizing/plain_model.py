"""Models in plain torch: the contract of their forward, and their attention over a ring of ranks.

Tensor parallelism requires two things, since a rank has some of the heads and features, consecutive rows of the weight:

- `forward` takes head counts from the width of a projection's output, as in
  `q_proj(x).unflatten(-1, (-1, head_dim))`.
- Between two sharded layers it treats heads and features independently. A norm over all features computes something
  else on a shard; so does `chunk` of one layer for q, k and v, or for gate and up. Split such a layer into several.

Sequence and context parallelism also require:

- forward(tokens [batch, seq], ..., positions [seq] or [batch, seq]) -> tensors [batch, seq, ...], in any nesting.
  Other outputs, such as a mean over tokens, are refused, except a scalar loss without context parallelism. The argument
  is called `positions` or `position_ids`, and is the only source of a token's place in the sequence.
- Attention is `torch.nn.functional.scaled_dot_product_attention` of q, k, v [batch, heads, seq, head_dim] with
  is_causal=True, or with neither a mask nor is_causal, called inside the parent modules of planned layers.
- With sequence parallelism, a module that owns `q_proj` (`wq`, ...) passes its first argument to it unchanged.
- A KV cache, if any, is the argument `cache`, `kv_cache` or `past_key_values`; a forward pass with one is not sharded.
- For `labels` with context parallelism or loss_parallel: `self.loss_function(logits, labels, vocab_size, ...)` is the
  mean cross entropy of token i's logits against label i + 1, as in transformers. A loss over all ranks replaces it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fused_tp.parallelizing.forward_shard import CpContext, ForwardShard
from fused_tp.parallelizing.layers import holds_sharded_heads
from fused_tp.parallelizing.outputs import map_tensors
from fused_tp.parallelizing.readers import splits_output
from fused_tp.parallelizing.sequence_sharding import PASSES_ON, Parallelism, RowMasks, SequenceSharding, sharded_head
from fused_tp.parallelizing.shard_plan import Style, StyleSpec, spec_of

POSITIONS = ("positions", "position_ids")
CACHES = ("cache", "kv_cache", "past_key_values")


def check_plain_model(model: nn.Module, plan: Mapping[str, Style], parallelism: Parallelism) -> None:
    """Refuse a model that visibly breaks the contract above.

    Raises:
        ValueError: names the missing part.
    """
    kind = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if parallelism.shards_sequence and not any(name in parameters for name in POSITIONS):
        asked = "a cp_dim of more than one rank" if parallelism.cp_mesh is not None else "sequence_parallel=True"
        raise ValueError(
            f"{kind}.forward has no argument `positions` or `position_ids`, which {asked} needs: a rank holds a part "
            "of the sequence and must be told where in the sequence it lies."
        )
    mixes = next((name for name, m in model.named_modules() if _mixes_tokens(m)), None)
    if parallelism.shards_sequence and mixes is not None:
        raise ValueError(
            f"{mixes!r} ({type(model.get_submodule(mixes)).__name__}) mixes tokens by other means than attention, "
            "which a rank that holds a part of the sequence cannot; use neither cp_dim nor sequence_parallel."
        )
    for name, style in plan.items():
        _check_not_split(model, name, spec_of(style))
    heads = _heads(plan)
    for asked in ("sequence_parallel", "loss_parallel"):
        if getattr(parallelism, asked) and len(heads) != 1 and not hasattr(model, PASSES_ON):
            raise ValueError(
                f"{asked}=True needs one output layer with the style 'colwise_gather_output' in the plan; it has "
                f"{len(heads)}."
            )
    if parallelism.loss_parallel and not callable(getattr(model, "loss_function", None)):
        raise ValueError(
            f"loss_parallel=True needs {kind}.loss_function(logits, labels, vocab_size), which parallelize replaces by "
            "the cross entropy over all ranks' vocabulary; it has none."
        )


def _check_not_split(model: nn.Module, name: str, spec: StyleSpec) -> None:
    """Refuse to shard a packed column layer (q, k and v) as one layer, and code that splits its output by the widths of
    the whole model."""
    parent, _, leaf = name.rpartition(".")
    if spec.shard_dim != 0 or spec.gathers_output or spec.needs is not nn.Linear:
        return
    owner = type(model.get_submodule(parent))
    taken_apart = splits_output(owner, leaf)
    if taken_apart is None or (spec.parts > 1 and taken_apart == "chunk"):
        return
    raise ValueError(
        f"{owner.__name__} takes what {name!r} returns apart by {taken_apart}(), and the plan shards {name!r} "
        + ("into parts, of which a rank has a share each" if spec.parts > 1 else "as one layer, of consecutive rows")
        + ". Take it apart by .chunk(3, dim=-1) (or 2, of gate and up), which goes by the width that a rank has, and "
        f"give {name!r} the style 'packed_colwise_3' (or 'packed_colwise'); or make it a layer for each part."
    )


def _mixes_tokens(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.conv._ConvNd):
        return any(size > 1 for size in module.kernel_size)
    return isinstance(module, (nn.RNNBase, nn.modules.batchnorm._NormBase))


class PlainSequence(SequenceSharding):
    """Sequence sharding of a plain model, whose first argument is the tokens."""

    def __init__(self, model: nn.Module, parallelism: Parallelism, plan: Mapping[str, Style]) -> None:
        super().__init__(model, parallelism)
        names = list(inspect.signature(model.forward).parameters)
        self.tokens = (names[0],)
        self.positions = next((name for name in POSITIONS if name in names), None)
        self.labels = "labels" if "labels" in names else None
        self.caches = tuple(name for name in CACHES if name in names)
        self.plan = plan
        self.has_loss = callable(getattr(model, "loss_function", None))

    def adapt(self, model: nn.Module) -> None:
        """Replace the model's attention and loss. Its layers have been replaced already."""
        parallelism = self.parallelism
        heads = _heads(self.plan)
        self.head = sharded_head(model.get_submodule(heads[0]) if len(heads) == 1 else None)
        if parallelism.cp_mesh is not None:
            # Not one mode around the whole model: activation checkpointing reruns layers in backward, outside of it.
            for module in _modules_around_attention(model, self.plan):
                forward = module.forward
                # A partial, unlike a closure, survives copy.deepcopy.
                wrapped: Any = partial(_with_ring_attention, self, holds_sharded_heads(module), forward)
                wrapped.__signature__ = inspect.signature(forward)  # transformers' generate reads it
                module.forward = wrapped
        if parallelism.computes_loss and self.has_loss:
            users = cast(Any, model)  # nn.Module does not declare the attribute
            users.loss_function = self.global_loss(users.loss_function)

    def check(self, arguments: dict[str, Any], seq_len: int, targets: Tensor | None) -> RowMasks:
        if targets is not None and not self.has_loss:
            raise ValueError(
                "labels were given, but the model has no loss_function attribute to compute a loss over all ranks "
                "with. Give it one (see fused_tp.parallelizing.plain_model), or compute the loss from the logits: "
                "call the model without labels."
            )
        given = None if self.positions is None else arguments.get(self.positions)
        if self.parallelism.cp_mesh is not None and given is not None and bool((given.diff(dim=-1) != 1).any()):
            raise ValueError(
                f"{self.positions} does not count up by one: several documents in one row would attend to each other "
                "across the context parallel ranks. Give each document its own row, or use no cp_dim."
            )
        return RowMasks()

    def unshard_output(self, output: Any, shard: ForwardShard) -> Any:
        if not self.parallelism.shards_sequence:
            return output
        return map_tensors(lambda t: self.whole_of_tokens(t, shard), output)


def _heads(plan: Mapping[str, Style]) -> list[str]:
    return [name for name, style in plan.items() if spec_of(style).gathers_output]


def _modules_around_attention(model: nn.Module, plan: Mapping[str, Style]) -> list[nn.Module]:
    """Parents of sharded layers; without a plan, every module that has submodules."""
    specs = {name: spec_of(style) for name, style in plan.items()}
    parents = {
        name.rpartition(".")[0]
        for name, spec in specs.items()
        if spec.shard_dim is not None and spec.needs is not nn.Embedding and not spec.gathers_output
    }
    if parents:
        return [model.get_submodule(name) for name in sorted(parents)]
    computes = [m for m in model.modules() if type(m).forward is not nn.Module.forward]
    return [module for module in computes if any(True for _ in module.children())] or [model]


def _with_ring_attention(
    sequence: SequenceSharding, heads_sharded: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    cp = sequence.state_now().cp
    # One mode at a time: an outer mode would intercept the ring's own attention calls.
    if cp is None or getattr(_inside, "mode", False):
        return forward(*args, **kwargs)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # before its import nothing has been compiled
    if dynamo is not None and not torch.compiler.is_compiling():
        # If torch.compile cannot trace the model's own frame, it would trace the mode's, and treat all functions like
        # the first one. Skip it on each call: torch._dynamo.reset() forgets skips.
        dynamo.skip_code(RingAttentionMode.__torch_function__.__code__)
    _inside.mode = True
    try:
        with RingAttentionMode(cp, heads_sharded):
            return forward(*args, **kwargs)
    finally:
        _inside.mode = False


WHOLE_ATTENTIONS = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)

PYTHON_METHODS = {name for name, method in vars(Tensor).items() if isinstance(method, FunctionType)}

_inside = threading.local()  # .mode: True while this thread is in a RingAttentionMode


class RingAttentionMode(TorchFunctionMode):
    """Mode in which F.scaled_dot_product_attention computes attention over the ring."""

    def __init__(self, cp: CpContext, heads_sharded: bool) -> None:
        super().__init__()
        self.cp = cp
        self.heads_sharded = heads_sharded

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func in WHOLE_ATTENTIONS:
            # torch disables the mode while these functions run, so their inner attention would not be intercepted: a
            # rank's tokens would attend to each other only.
            raise ValueError(
                "nn.MultiheadAttention (or an nn.Transformer layer) was called; over context parallel ranks attention "
                "must be F.scaled_dot_product_attention, called by the model's own modules."
            )
        if torch.compiler.is_compiling():
            # torch.compile can trace these as attributes of a tensor, but not as functions. (Look them up by name: in
            # a generator, torch.compile does not find functions in a set.)
            if func is getattr:
                return getattr(*args)
            name = getattr(func, "__name__", "")
            if name in PYTHON_METHODS and getattr(Tensor, name) is func:
                return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                f"scaled_dot_product_attention was called with attn_mask {tuple(attn_mask.shape)}; over context "
                "parallel ranks only is_causal=True, or no mask at all, is served."
            )
        if query.ndim != 4:
            raise ValueError(
                f"scaled_dot_product_attention was called with q of shape {tuple(query.shape)}; over context parallel "
                "ranks it must be [batch, heads, seq, head_dim]."
            )
        return self.cp.attention(
            query, key, value, causal=is_causal, scale=scale, dropout_p=dropout_p, heads_sharded=self.heads_sharded
        )
