"""A plain single-device Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU, a KV cache.

Like a user's own model, it contains no code for parallelism: `fused_tp.parallelize(model, mesh)` shards it by
`Llama.tp_plan`. Two habits make that possible in any model: `forward` derives head counts from the width of a
projection's output, and takes positions as an argument. A rank may then hold any shard of the heads and of the
sequence. Module names are those of transformers' Llama, so its checkpoints load without conversion.

Sources: Touvron et al. 2023 (arXiv:2302.13971); RoPE, Su et al. 2021 (arXiv:2104.09864); grouped-query attention,
Ainslie et al. 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a `Llama`. `num_key_value_heads` divides `num_attention_heads`, which divides `hidden_size`."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_attention_heads {self.num_attention_heads}: RoPE needs an "
                f"even head size, so hidden_size must be a multiple of {2 * self.num_attention_heads}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, which is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}): every key/value head serves equally many query heads."
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class LlamaOutput(NamedTuple):
    """`logits` [batch, seq, vocab]; `loss`, a scalar, if labels were given, else None."""

    logits: Tensor
    loss: Tensor | None


class KVCache:
    """Keys and values of the tokens seen so far, a pair [batch, kv_heads, seen, head_dim] for each layer."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def seen(self) -> int:
        """Number of cached tokens; read it between two forward passes, when all layers hold equally many."""
        return next((k.shape[2] for k, _ in self._layers.values()), 0)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values and return all of them."""
        if layer in self._layers:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._layers[layer], (k, v), strict=True))
        self._layers[layer] = (k, v)
        return k, v


def rotary_cos_sin(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., seq, head_dim] in fp32 for `positions` [..., seq]."""
    inverse_frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float().unsqueeze(-1) * inverse_frequency
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [batch, heads, seq, head_dim], pairing feature i with i + head_dim / 2; computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dim, in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention: x [batch, seq, hidden] -> [batch, seq, hidden]."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        new, seen = q.shape[2], k.shape[2]
        mask = None
        if 1 < new < seen:
            # SDPA's is_causal aligns queries with the first keys; after a cached prefix they must align with the last.
            mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=new == seen, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202): x [..., hidden] -> [..., hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [batch, seq, hidden] -> [batch, seq, hidden]."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaBackbone(nn.Module):
    """Embedding, decoder layers and the last norm: tokens [batch, seq] -> hidden states [batch, seq, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        if positions is None:
            seen = cache.seen if cache is not None else 0
            positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
        cos, sin = rotary_cos_sin(positions, self.config.head_dim, self.config.rope_theta)
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # a dim for the heads: positions may be [seq] or [batch, seq]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        return self.norm(x)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    *,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross entropy of token i's logits against label i + 1, in fp32.

    `labels` are as long as `logits` [batch, seq, vocab] and not yet shifted. `shift_labels`, if given, replace them and
    are already shifted (a caller with a shard of the sequence shifts before sharding). The keywords are those of the
    `loss_function` of a transformers model.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError(
                "Neither labels nor shift_labels were given: pass one of them, [batch, seq] of token numbers."
            )
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    return F.cross_entropy(logits.float().view(-1, vocab_size), shift_labels.reshape(-1), ignore_index=ignore_index)


class Llama(nn.Module):
    """The language model: forward(tokens [batch, seq]) -> LlamaOutput(logits [batch, seq, vocab], loss or None).

    Example:
        >>> model = Llama(LlamaConfig())
        >>> tokens = torch.randint(256, (2, 128))
        >>> model(tokens, labels=tokens).loss.backward()
        >>> model.generate(tokens[:, :16], max_new_tokens=8).shape
        torch.Size([2, 24])
    """

    # Sharding of the linear layers, in the format of transformers' tp_plan.
    tp_plan: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaBackbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = causal_lm_loss
        self.apply(self._init_weights)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        shift_labels: Tensor | None = None,
    ) -> LlamaOutput:
        """Compute logits and, with `labels` [batch, seq] (usually the tokens; -100 is ignored), the mean loss.

        `positions` [seq] or [batch, seq] are the tokens' positions in the text (default: after the tokens in `cache`).
        `shift_labels` replaces `labels` if the caller has already shifted them: see `causal_lm_loss`.
        """
        logits = self.lm_head(self.model(tokens, positions, cache))
        if labels is None and shift_labels is None:
            return LlamaOutput(logits, None)
        return LlamaOutput(
            logits, self.loss_function(logits, labels, self.config.vocab_size, shift_labels=shift_labels)
        )

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, max_new_tokens: int, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue `tokens` [batch, seq] by `max_new_tokens`, through a KV cache; greedy at temperature 0."""
        cache = KVCache()
        new = tokens
        for _ in range(max_new_tokens):
            logits = self(new, cache=cache).logits[:, -1].float()
            if temperature > 0:
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                new = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, new), dim=1)
        return tokens
