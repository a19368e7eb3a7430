"""Models in plain torch: the contract of their forward, and their attention over a ring of ranks.

Under tensor parallelism each rank holds consecutive rows of a weight: some of the heads and features. So the model must
do two things:

- `forward` computes the number of heads from the width of a projection's output, as in
  `q_proj(x).unflatten(-1, (-1, head_dim))`.
- Between two sharded layers it treats heads and features independently. A norm over all features gives another result
  on a shard; so does `chunk` of one layer for q, k and v, or for gate and up. Split such a layer into several.

Sequence and context parallelism also require:

- forward(tokens [batch, seq], ..., positions [seq] or [batch, seq]) -> tensors [batch, seq, ...], in any nesting.
  Other outputs, such as a mean over tokens, raise ValueError, except a scalar loss without context parallelism. The
  argument is called `positions` or `position_ids`; forward must derive the position of a token only from it.
- Attention is `torch.nn.functional.scaled_dot_product_attention` of q, k, v [batch, heads, seq, head_dim] with
  is_causal=True, or with neither a mask nor is_causal. It is called inside the parent modules of planned layers.
- With sequence parallelism, a module that owns `q_proj` (`wq`, ...) passes its first argument to it unchanged.
- A KV cache, if any, is the argument `cache`, `kv_cache` or `past_key_values`; a forward pass with one is not sharded.
- For `labels` with context parallelism or loss_parallel: `self.loss_function(logits, labels, vocab_size, ...)` is the
  mean cross entropy of token i's logits against label i + 1, as in transformers. `parallelize` replaces it by a loss
  over all ranks.
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
from fused_tp.parallelizing.readers import find_output_split
from fused_tp.parallelizing.sequence_sharding import (
    INNER_STAGE_ATTRIBUTE,
    Parallelism,
    RowMasks,
    SequenceSharding,
    sharded_head,
)
from fused_tp.parallelizing.shard_plan import Style, StyleSpec, spec_of
from fused_tp.parallelizing.whole_blocks import mixes_tokens

POSITION_NAMES = ("positions", "position_ids")
CACHE_NAMES = ("cache", "kv_cache", "past_key_values")


def check_plain_model(model: nn.Module, plan: Mapping[str, Style], parallelism: Parallelism) -> None:
    """Check, as far as the code of `model` shows, that it keeps the contract above.

    Raises:
        ValueError: `model` violates the contract; the message names the requirement.
    """
    class_name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if parallelism.shards_sequence and not any(name in parameters for name in POSITION_NAMES):
        option = "a cp_dim of more than one rank" if parallelism.cp_mesh is not None else "sequence_parallel=True"
        raise ValueError(
            f"{class_name}.forward must have an argument `positions` or `position_ids` for {option}: each rank "
            "passes the positions of its shard of the sequence. Add the argument."
        )
    mixing_name = next((name for name, m in model.named_modules() if mixes_tokens(m)), None)
    if parallelism.shards_sequence and mixing_name is not None:
        raise ValueError(
            f"{mixing_name!r} ({type(model.get_submodule(mixing_name)).__name__}) combines tokens by other means than "
            "attention, which is not supported on a shard of the sequence. Use neither cp_dim nor sequence_parallel."
        )
    for name, style in plan.items():
        _check_not_split(model, name, spec_of(style))
    output_layers = _output_layer_names(plan)
    for option in ("sequence_parallel", "loss_parallel"):
        if getattr(parallelism, option) and len(output_layers) != 1 and not hasattr(model, INNER_STAGE_ATTRIBUTE):
            raise ValueError(
                f"{option}=True needs exactly one module (the output layer) with the style 'colwise_gather_output' "
                f"in the plan, got {len(output_layers)}."
            )
    if parallelism.loss_parallel and not callable(getattr(model, "loss_function", None)):
        raise ValueError(
            f"loss_parallel=True needs {class_name}.loss_function(logits, labels, vocab_size), which parallelize "
            "replaces by the cross entropy over all ranks' vocabulary. Define it and call it in forward."
        )


def _check_not_split(model: nn.Module, name: str, spec: StyleSpec) -> None:
    """Check how the parent module splits the output of the column layer `name`.

    Raises:
        ValueError: the layer is packed (q, k and v) but sharded as one layer; or its output is split by the widths of
            the unsharded model.
    """
    parent, _, leaf = name.rpartition(".")
    if spec.shard_dim != 0 or spec.gathers_output or spec.module_class is not nn.Linear:
        return
    owner = type(model.get_submodule(parent))
    splitter = find_output_split(owner, leaf)
    if splitter is None or (spec.num_parts > 1 and splitter == "chunk"):
        return
    raise ValueError(
        f"{owner.__name__} splits the output of {name!r} by {splitter}(), which is not supported: the plan shards "
        f"{name!r} "
        + (
            "by chunks, so the widths on a rank are smaller"
            if spec.num_parts > 1
            else "as one layer, by consecutive rows"
        )
        + ". Split by .chunk(3, dim=-1) for q, k and v, or .chunk(2, dim=-1) for gate and up, which use the width on "
        f"the rank, and give {name!r} the style 'packed_colwise_3' or 'packed_colwise'; or use separate layers."
    )


class PlainSequenceSharding(SequenceSharding):
    """Sequence sharding of a plain model, whose first argument is the tokens."""

    def __init__(self, model: nn.Module, parallelism: Parallelism, plan: Mapping[str, Style]) -> None:
        super().__init__(model, parallelism)
        names = list(inspect.signature(model.forward).parameters)
        self.token_names = (names[0],)
        self.position_name = next((name for name in POSITION_NAMES if name in names), None)
        self.label_name = "labels" if "labels" in names else None
        self.cache_names = tuple(name for name in CACHE_NAMES if name in names)
        self.plan = plan
        self.has_loss = callable(getattr(model, "loss_function", None))

    def adapt(self, model: nn.Module) -> None:
        """Replace the attention and loss of `model`, whose layers have been replaced already."""
        parallelism = self.parallelism
        output_layers = _output_layer_names(self.plan)
        self.head = sharded_head(model.get_submodule(output_layers[0]) if len(output_layers) == 1 else None)
        if parallelism.cp_mesh is not None:
            # A mode around each module that calls attention, not one around the model's forward: activation
            # checkpointing reruns layers in backward, when the model's forward has returned.
            for module in _modules_around_attention(model, self.plan):
                forward = module.forward
                # A partial, unlike a closure, survives copy.deepcopy.
                wrapped_forward: Any = partial(_run_with_ring_attention, self, holds_sharded_heads(module), forward)
                wrapped_forward.__signature__ = inspect.signature(forward)  # transformers' generate reads it
                module.forward = wrapped_forward
        if parallelism.computes_loss and self.has_loss:
            untyped_model = cast(Any, model)  # nn.Module does not declare loss_function
            untyped_model.loss_function = self.make_global_loss(untyped_model.loss_function)

    def check_arguments(self, arguments: dict[str, Any], seq_len: int, targets: Tensor | None) -> RowMasks:
        if targets is not None and not self.has_loss:
            raise ValueError(
                "forward was called with labels, but the model has no loss_function to replace by a loss over all "
                "ranks. Add one (see fused_tp.parallelizing.plain_model), or call the model without labels and compute "
                "the loss from its logits."
            )
        positions = None if self.position_name is None else arguments.get(self.position_name)
        if self.parallelism.cp_mesh is not None and positions is not None and bool((positions.diff(dim=-1) != 1).any()):
            raise ValueError(
                f"{self.position_name} must increase by one along each row: packed documents in one row are not "
                "supported over context parallel ranks, where they would attend to each other. Pass one document per "
                "row, or use no cp_dim."
            )
        return RowMasks()

    def unshard_output(self, output: Any, shard: ForwardShard) -> Any:
        if not self.parallelism.shards_sequence:
            return output
        return map_tensors(lambda t: self.gather_tokens(t, shard), output)


def _output_layer_names(plan: Mapping[str, Style]) -> list[str]:
    return [name for name, style in plan.items() if spec_of(style).gathers_output]


def _modules_around_attention(model: nn.Module, plan: Mapping[str, Style]) -> list[nn.Module]:
    """Return the parents of sharded layers; without a plan, all modules that have a forward and submodules."""
    specs = {name: spec_of(style) for name, style in plan.items()}
    parents = {
        name.rpartition(".")[0]
        for name, spec in specs.items()
        if spec.shard_dim is not None and spec.module_class is not nn.Embedding and not spec.gathers_output
    }
    if parents:
        return [model.get_submodule(name) for name in sorted(parents)]
    modules = [m for m in model.modules() if type(m).forward is not nn.Module.forward]
    return [module for module in modules if any(True for _ in module.children())] or [model]


def _run_with_ring_attention(
    sequence: SequenceSharding, are_heads_sharded: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    cp = sequence.current_state().cp
    # One mode at a time: an outer mode would intercept the ring's own attention calls.
    if cp is None or getattr(_thread_state, "is_in_mode", False):
        return forward(*args, **kwargs)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # if it was never imported, nothing has been compiled
    if dynamo is not None and not torch.compiler.is_compiling():
        # If torch.compile cannot trace the model's frame, it traces the mode's __torch_function__ instead, and then
        # handles every `func` like the first one. So make dynamo skip it, on each call: torch._dynamo.reset() drops
        # the skip.
        dynamo.skip_code(RingAttentionMode.__torch_function__.__code__)
    _thread_state.is_in_mode = True
    try:
        with RingAttentionMode(cp, are_heads_sharded):
            return forward(*args, **kwargs)
    finally:
        _thread_state.is_in_mode = False


# Functions that call scaled_dot_product_attention inside, where the mode cannot intercept it.
_FUSED_ATTENTION_FUNCTIONS = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)

_PYTHON_METHODS = {name for name, method in vars(Tensor).items() if isinstance(method, FunctionType)}

_thread_state = threading.local()  # attribute `is_in_mode`: True while this thread is in a RingAttentionMode


class RingAttentionMode(TorchFunctionMode):
    """Mode in which F.scaled_dot_product_attention computes attention over the ring."""

    def __init__(self, cp: CpContext, are_heads_sharded: bool) -> None:
        super().__init__()
        self.cp = cp
        self.are_heads_sharded = are_heads_sharded

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func in _FUSED_ATTENTION_FUNCTIONS:
            # torch disables the mode while these functions run, so the attention inside would not be intercepted, and
            # a rank's tokens would attend only to each other.
            raise ValueError(
                "nn.MultiheadAttention (or an nn.Transformer layer) is not supported over context parallel ranks. Call "
                "F.scaled_dot_product_attention in the model's modules instead."
            )
        if torch.compiler.is_compiling():
            # torch.compile can trace getattr and Python methods of Tensor only if they are called on the tensor, not
            # as the function `func`. Compare by name: torch.compile does not find functions in a set.
            if func is getattr:
                return getattr(*args)
            name = getattr(func, "__name__", "")
            if name in _PYTHON_METHODS and getattr(Tensor, name) is func:
                return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
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
                f"scaled_dot_product_attention was called with attn_mask {tuple(attn_mask.shape)}, which is not "
                "supported over context parallel ranks. Pass is_causal=True, or no mask."
            )
        if query.ndim != 4:
            raise ValueError(
                "over context parallel ranks, q of scaled_dot_product_attention must be [batch, heads, seq, head_dim], "
                f"got shape {tuple(query.shape)}."
            )
        return self.cp.attend(
            query,
            key,
            value,
            causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            are_heads_sharded=self.are_heads_sharded,
        )
