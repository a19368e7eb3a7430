"""Replacements for the custom attention code of some families of transformers models.

Most models pass queries, keys and values to a function that transformers looks up (see `hf_attention`). In the families
below, a method of the attention module computes attention itself, with seq x seq scores. In forward passes whose tokens
or KV cache are sharded over ranks, a function of this file replaces that method. It computes the same, but calls
`attend(query, key, value, scaling=None, sliding_window=None, alibi_slopes=None)` for the attention. `attend` takes
[batch, heads, seq, head_dim] and returns [batch, seq, heads, head_dim]. It is causal, applies the module's dropout and
needs no mask.

ALiBi adds slope * position to scores. Softmax depends only on differences of scores, so attention over ranks needs only
the slopes. It adds biases in fp32, whereas transformers rounds Bloom's biases to the dtype of the model. Not supported:
Falcon with ALiBi (transformers always rounds its biases to bfloat16, which slopes alone cannot reproduce).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Attend: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class CustomAttention:
    """The attention method of one model family, and its replacement.

    Attributes:
        class_name: class name of the attention modules.
        replacement: the replacement, called as replacement(module, attend, ...) with the method's arguments.
        method_name: name of the method that `replacement` replaces.
        dropout_attribute: name of the module's attribute (a number or nn.Dropout) that holds the dropout probability;
            "" for no dropout.
    """

    class_name: str
    replacement: Callable[..., Any]
    method_name: str = "forward"
    dropout_attribute: str = ""

    def find_modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the attention modules of `model`, or [] if `replacement` cannot replace the method of one of them."""
        modules = [module for module in model.modules() if type(module).__name__ == self.class_name]
        return modules if all(map(self._is_known, modules)) else []

    def _is_known(self, module: nn.Module) -> bool:
        """True if transformers calls the method in `module` with the arguments that `replacement` reads."""
        original, forward = getattr(type(module), self.method_name, None), inspect.unwrap(type(module).forward)
        if original is None or {self.method_name, "forward"} & vars(module).keys():
            return False
        _, _, *parameters = inspect.signature(self.replacement).parameters.values()
        names = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
        is_called = self.method_name == "forward" or self.method_name in forward.__code__.co_names
        return is_called and names <= {*inspect.signature(original).parameters}

    def dropout_probability(self, module: nn.Module) -> float:
        """Dropout probability of `module` in its current mode."""
        p: Any = getattr(module, self.dropout_attribute) if self.dropout_attribute and module.training else 0.0
        return float(p.p if isinstance(p, nn.Dropout) else p)


# ---- replacements for methods that take queries, keys and values: return (output [batch, heads, seq, head_dim], None)


def attend_by_head(module: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> list[Any]:
    return [attend(query, key, value).transpose(1, 2), None]


def attend_openai_gpt(module: Any, attend: Attend, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Any]:
    out = attend(q, k.transpose(2, 3), v, scaling=None if module.scale else 1.0)  # keys: [batch, heads, head_dim, seq]
    return [out.transpose(1, 2), None]


def attend_gpt_neo(module: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> list[Any]:
    window = module.config.window_size if module.attention_type == "local" else None
    return [attend(query, key, value, scaling=1.0, sliding_window=window).transpose(1, 2), None]


# ---- replacements for forward: return (output [batch, seq, hidden], None) -------------------------------------------


def _split_heads(module: Any, features: Tensor) -> Tensor:
    return features.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


def _update_cache(module: Any, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return (key, value) if cache is None else cache.update(key, value, module.layer_idx)


def _model_file_attribute(module: nn.Module, name: str) -> Any:
    return getattr(sys.modules[type(module).__module__], name)


def _global_head_count(module: Any) -> int:
    # not module.num_heads, which is already divided by the tensor parallel size
    num_heads: int = module.hidden_size // module.head_dim
    return num_heads


def attend_xglm(
    module: Any, attend: Attend, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    projections = (layer(hidden_states) for layer in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (_split_heads(module, features) for features in projections)
    out = attend(query, *_update_cache(module, past_key_values, key, value), scaling=module.scaling)
    return module.out_proj(out.flatten(2)), None


def attend_falcon(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    qkv = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (x.transpose(1, 2) for x in qkv)
    query, key = _model_file_attribute(module, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    out = attend(query, *_update_cache(module, layer_past, key, value))
    return module.dense(out.flatten(2)), None


def attend_bloom(
    module: Any, attend: Attend, hidden_states: Tensor, residual: Tensor, layer_past: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    # A mask of two tokens: the bias of the second token is the slope of its head.
    mask = torch.ones(1, 2, dtype=torch.int64, device=value.device)
    biases = _model_file_attribute(module, "build_alibi_tensor")(mask, _global_head_count(module), torch.float32)
    out = attend(query, *_update_cache(module, layer_past, key, value), alibi_slopes=biases[:, 0, 1])
    dropout_add = _model_file_attribute(module, "dropout_add")
    return dropout_add(module.dense(out.flatten(2)), residual, module.hidden_dropout, module.training), None


def attend_mpt(
    module: Any, attend: Attend, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    packed_qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        packed_qkv = packed_qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (_split_heads(module, features) for features in packed_qkv.chunk(3, dim=2))
    build_alibi = _model_file_attribute(module, "build_mpt_alibi_tensor")
    biases = build_alibi(_global_head_count(module), 2, device=value.device)  # of two tokens: -slope and 0
    key, value = _update_cache(module, past_key_values, key, value)
    out = attend(query, key, value, scaling=module.softmax_scale, alibi_slopes=-biases[:, 0, 0])
    return module.out_proj(out.flatten(2)), None
