"""Sizes of a model that determine its costs and its legal shardings, per layer and outside the layers.

`fused_tp.planning.find_shape` counts the sizes in the model that transformers creates. Only the models in SHAPES, which
are known by name without a config, use the formulas of `decoder`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fused_tp.core.heads import partition_heads

if TYPE_CHECKING:
    from fused_tp.planning.config import ParallelConfig


@dataclass(frozen=True)
class Weights:
    """Number of parameters, total and sharded.

    Attributes:
        count: total number.
        sharded_count: number of parameters that are sharded over tensor parallel ranks; the rest is replicated.
    """

    count: int = 0
    sharded_count: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.count + other.count, self.sharded_count + other.sharded_count)

    def on_rank(self, tp: int) -> float:
        """Return the number of parameters that each of `tp` ranks holds."""
        return self.count - self.sharded_count + self.sharded_count / tp


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax attention of a layer.

    Attributes:
        num_heads, num_kv_heads: number of query heads and of key/value heads; for latent attention (arXiv:2405.04434)
            the heads computed from the latents.
        head_dim: features of a head; if queries and values differ, the mean of both.
        window: number of tokens that a token attends to; None: all previous tokens.
        is_sharded: True if heads are sharded over tensor parallel ranks.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: float
    window: int | None = None
    is_sharded: bool = True

    def has_uneven_heads(self, tp: int) -> bool:
        """True if `tp` tensor parallel ranks get different numbers of heads, or share key/value heads differently."""
        divides_kv_heads = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        return self.is_sharded and self.num_heads > 0 and not (self.num_heads % tp == 0 and divides_kv_heads)

    def local_heads(self, tp: int) -> tuple[int, int]:
        """Return the numbers of query and of key/value heads of the tensor parallel rank with the most."""
        if not (self.is_sharded and self.num_heads):
            return self.num_heads, self.num_kv_heads
        if not self.has_uneven_heads(tp):
            return self.num_heads // tp, max(1, self.num_kv_heads // tp)
        partition = partition_heads(self.num_heads, self.num_kv_heads, tp)
        return max(heads.num_heads for heads in partition), max(len(heads.kv_heads) for heads in partition)

    def attended_tokens(self, seq: int) -> float:
        """Return the mean number of tokens that a token in a row of `seq` tokens attends to."""
        window = min(seq, self.window or seq)
        return window - window * window / (2 * seq)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Matmuls of a layer between two norms, counted for one token; only its active experts count.

    Attributes:
        column_features: column-parallel weights per hidden feature.
        row_features: row-parallel weights per hidden feature.
        replicated_features: replicated weights per hidden feature.
        saved_features: sharded features inside the block that are kept for backward.
        saved_replicated_features: replicated features inside the block that are kept for backward.
        has_pointwise_ops: True if activations or rotary embeddings read and write these features.
        has_experts: True if the matmuls include experts.
    """

    column_features: float = 0.0
    row_features: float = 0.0
    replicated_features: float = 0.0
    saved_features: float = 0.0
    saved_replicated_features: float = 0.0
    has_pointwise_ops: bool = True
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of one layer.

    Attributes:
        name: name of the layer's class, for messages.
        weights: parameters except routed experts. A weight shared by several layers counts in the first layer.
        expert_weights: parameters of all routed experts; shared experts count in `weights`.
        experts, experts_per_token: number of routed experts, total and per token; 0: no experts.
        blocks: matmuls, in order of execution.
        attention: attention modules of the layer.
        tensor_count: number of parameter tensors; the optimizer has a constant overhead for each.
    """

    name: str
    weights: Weights
    expert_weights: Weights = Weights()
    experts: int = 0
    experts_per_token: int = 0
    blocks: tuple[Block, ...] = ()
    attention: tuple[Attention, ...] = ()
    tensor_count: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters of the layer, including all experts."""
        return self.weights.count + self.expert_weights.count

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses."""
        num_active = self.expert_weights.count * self.experts_per_token // self.experts if self.experts else 0
        return self.weights.count + num_active


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model whose layers each map one hidden state to the next.

    Attributes:
        name: name for messages.
        hidden: features of the hidden state.
        vocab: features of the logits.
        stack: the layers, in order of execution.
        embedding: weights outside the layers; includes the output layer only if `is_tied`.
        output: weights of the output layer.
        is_tied: True if the output layer shares its weight with the embedding.
        notes: messages about parts of the model that the cost model omits.
        check: raises ValueError if `parallelize` would reject a ParallelConfig; None: heads and experts decide.
    """

    name: str
    hidden: int
    vocab: int
    stack: tuple[Layer, ...]
    embedding: Weights
    output: Weights
    is_tied: bool = False
    notes: tuple[str, ...] = ()
    check: Callable[[ParallelConfig], None] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def layer_kinds(self) -> tuple[Layer, ...]:
        """Distinct layers, in order of first use."""
        return tuple(dict.fromkeys(self.stack))

    @cached_property
    def _kind_indices(self) -> tuple[int, ...]:
        kind_index_of_layer = {kind: kind_index for kind_index, kind in enumerate(self.layer_kinds)}
        return tuple(kind_index_of_layer[layer] for layer in self.stack)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.stack)

    def layer_counts_of_stages(self, num_stages: int) -> list[tuple[int, ...]]:
        """Return the number of layers of each kind in each of `num_stages` pipeline stages.

        If `num_stages` does not divide the number of layers, the first stages have one layer more.
        """
        return _count_kinds_per_stage(self._kind_indices, len(self.layer_kinds), num_stages)

    @cached_property
    def attention(self) -> tuple[Attention, ...]:
        """Distinct attention modules of all layers."""
        return tuple(dict.fromkeys(attention for kind in self.layer_kinds for attention in kind.attention))

    @property
    def experts(self) -> tuple[int, ...]:
        """Distinct numbers of experts per layer, without layers that have no experts."""
        return tuple(dict.fromkeys(kind.experts for kind in self.layer_kinds if kind.experts))

    @property
    def parameters(self) -> int:
        """Total number of parameters.

        Example:
            >>> round(SHAPES["llama-3-70b"].parameters / 1e9, 1)
            70.6
        """
        return self._parameters_outside_layers + sum(layer.parameters for layer in self.stack)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses.

        Example:
            >>> round(SHAPES["mixtral-8x7b"].active_parameters / 1e9, 1)
            12.9
        """
        return self._parameters_outside_layers + sum(layer.active_parameters for layer in self.stack)

    @property
    def _parameters_outside_layers(self) -> int:
        return self.embedding.count + (0 if self.is_tied else self.output.count)

    def flops(self, tokens: float, seq: int) -> float:
        """Return the model FLOPs of forward and backward for `tokens` tokens in rows of `seq`.

        Eq. 3 of Narayanan et al. (arXiv:2104.04473) without recomputation: 6 FLOPs per matmul weight that a token uses,
        plus full attention, including the scores that a causal mask hides. A window limits attention to its tokens.
        """
        counts = Counter(self._kind_indices)
        weights, attention_features = float(self.output.count), 0.0
        for kind_index, kind in enumerate(self.layer_kinds):
            weights += (
                counts[kind_index]
                * self.hidden
                * sum(block.column_features + block.row_features + block.replicated_features for block in kind.blocks)
            )
            for attention in kind.attention:
                window = min(seq, attention.window or seq)
                attention_features += counts[kind_index] * attention.num_heads * attention.head_dim * window
        return tokens * (6 * weights + 12 * attention_features)

    def summary(self) -> dict[str, Any]:
        """Return the sizes as plain numbers, which distinguish models whose parameters have the same shapes."""
        head_counts = [
            (attention.num_heads, attention.num_kv_heads) for layer in self.stack for attention in layer.attention
        ]
        return {
            "layers": self.layers,
            "hidden": self.hidden,
            "vocab": self.vocab,
            "heads": max((query_heads for query_heads, _ in head_counts), default=0),
            "kv_heads": max((kv_heads for _, kv_heads in head_counts), default=0),
            "tied": self.is_tied,
            "experts_per_token": max(layer.experts_per_token for layer in self.stack),
        }


@lru_cache(maxsize=64)
def _count_kinds_per_stage(kind_indices: tuple[int, ...], num_kinds: int, num_stages: int) -> list[tuple[int, ...]]:
    layers_per_stage, num_extra_layers = divmod(len(kind_indices), num_stages)
    starts = [stage * layers_per_stage + min(stage, num_extra_layers) for stage in range(num_stages + 1)]
    kinds_of_stages = [kind_indices[start:stop] for start, stop in pairwise(starts)]
    return [tuple(part.count(kind) for kind in range(num_kinds)) for part in kinds_of_stages]


def decoder_shape(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    vocab: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    gated: bool = True,
    tied: bool = False,
    experts: int = 0,
    experts_per_token: int = 0,
) -> ModelShape:
    """Compute the shape of a decoder with equal layers from its sizes, without norms and biases.

    Args:
        name: name for messages.
        layers, hidden, heads, kv_heads, head_dim, vocab: sizes with the same meaning as in transformers' configs.
        intermediate: features inside the MLP, or inside one expert.
        gated: True for a Llama-like layer: a gated MLP (SwiGLU) and rotary embeddings; False for a GPT-like layer.
        tied: True if the output layer shares its weight with the embedding.
        experts, experts_per_token: number of experts per layer and per token; 0: no experts.

    Example:
        >>> decoder_shape("small", layers=2, hidden=64, heads=4, intermediate=96, vocab=128).parameters
        86016
    """
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = hidden // heads if head_dim is None else head_dim
    query_features, qkv_features = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    active_features = intermediate * (experts_per_token if experts else 1)
    num_up_projections = 2 if gated else 1
    attention_parameters, mlp_parameters = (
        hidden * (qkv_features + query_features),
        (num_up_projections + 1) * hidden * intermediate,
    )
    dense_parameters, expert_parameters = (
        (attention_parameters, experts * mlp_parameters) if experts else (attention_parameters + mlp_parameters, 0)
    )
    layer = Layer(
        name="decoder layer",
        weights=Weights(dense_parameters, dense_parameters),
        expert_weights=Weights(expert_parameters, expert_parameters),
        experts=experts,
        experts_per_token=experts_per_token,
        blocks=(
            Block(
                column_features=qkv_features,
                row_features=query_features,
                saved_features=qkv_features + query_features,
                has_pointwise_ops=gated,
            ),
            Block(
                column_features=num_up_projections * active_features,
                row_features=active_features,
                saved_features=(num_up_projections + 1) * active_features,
                has_experts=experts > 0,
            ),
        ),
        attention=(Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim),),
        tensor_count=9 if gated else 8,  # projections and two norms
    )
    embedding = Weights(vocab * hidden, vocab * hidden)
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=vocab,
        stack=(layer,) * layers,
        embedding=embedding,
        output=embedding,
        is_tied=tied,
    )


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **other_sizes: Any
) -> ModelShape:
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    return decoder_shape(name, **sizes, intermediate=intermediate, vocab=vocab, **other_sizes)


# Sizes from the published config.json of each model; gpt3-175b: arXiv:2005.14165.
SHAPES = {
    shape.name: shape
    for shape in (
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
        _llama("qwen3-8b", 36, 4096, 32, 8, 12288, 151936),
        _llama("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
        _llama("qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151936, head_dim=128, experts=128, experts_per_token=8),
        _llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2),
        _llama("gpt3-175b", 96, 12288, 96, 96, 49152, 51200, gated=False, tied=True),
    )
}
