"""The sizes of a decoder that decide what it costs and how it can be cut."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fused_tp.runtime.errors import listed


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Of a decoder of equal layers, each attention and an MLP.

    Attributes:
        name: for messages.
        layers, hidden, heads, kv_heads, head_dim, vocab: as in transformers' configs.
        intermediate: features inside the MLP; of a layer with experts: inside one expert.
        gated: the MLP has a gate beside its up projection (SwiGLU).
        tied: the output layer is the embedding.
        experts, experts_per_token: of a layer; 0: none.
        shared_intermediate: features of what all tokens go through beside the experts.
        dense_layers: first layers that have an MLP of `dense_intermediate` features in place of experts.
        dense_intermediate: see there.
        latent_attention: keys and values are compressed (DeepSeek-V2, arXiv:2405.04434); cut by heads of queries.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    latent_attention: bool = False

    # -- numbers of parameters: weights of matmuls and embeddings; norms and biases are left out ----------------------

    @property
    def attention_parameters(self) -> int:
        """Of a layer's attention. Compressed keys and values are counted as whole ones, which is too many."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    def mlp_parameters(self, width: int) -> int:
        """Of an MLP with so many features inside."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def dense_width(self) -> int:
        """Features inside the MLP of a layer without experts."""
        return self.dense_intermediate or self.intermediate

    @property
    def active_width(self) -> int:
        """Features inside the MLP that one token goes through, in a layer of the more frequent kind."""
        if not self.experts:
            return self.intermediate
        return self.experts_per_token * self.intermediate + self.shared_intermediate

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding and the output layer."""
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """In all.

        Example:
            >>> round(SHAPES["llama-3-70b"].parameters / 1e9, 1)
            70.6
        """
        return self._with_experts(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through.

        Example:
            >>> round(SHAPES["mixtral-8x7b"].active_parameters / 1e9, 1)
            12.9
        """
        return self._with_experts(self.experts_per_token)

    def _with_experts(self, experts: int) -> int:
        wide = self.mlp_parameters(experts * self.intermediate + self.shared_intermediate)
        dense = self.mlp_parameters(self.dense_width)
        layers = self.layers * self.attention_parameters + self.embedding_parameters
        return layers + self.expert_layers * wide + (self.layers - self.expert_layers) * dense

    def flops(self, tokens: float, seq: int) -> float:
        """Of forward and backward of so many tokens in rows of `seq`, as MFU counts them.

        Eq. 3 of Narayanan et al. (arXiv:2104.04473) without recomputation: 6 for each weight of a matmul that a token
        goes through, and whole attention, also where a causal mask hides half of it.
        """
        weights = self.active_parameters - self.embedding_parameters + self.vocab * self.hidden
        return tokens * (6 * weights + 12 * self.layers * self.heads * self.head_dim * seq)

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Of a transformers config (of its text model, where it has several).

        Raises:
            ValueError: it has no such sizes, by name.
        """
        text = config.get_text_config()
        name = getattr(config, "name_or_path", "") or config.model_type

        def size(*names: str, default: Any = None) -> Any:
            found = next((getattr(text, one) for one in names if getattr(text, one, None) is not None), default)
            if found is None:
                raise ValueError(f"The config of {name} has no {names[0]}; it is no decoder that can be planned.")
            # Some configs have one for each layer.
            return max(found) if isinstance(found, (list, tuple)) else found

        hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "n_heads")
        experts = size("num_local_experts", "num_experts", "n_routed_experts", default=0)
        wide = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        inside = size("moe_intermediate_size", default=wide) if experts else wide
        shared = size("shared_expert_intermediate_size", default=size("n_shared_experts", default=0) * inside)
        activation = str(size("hidden_act", "activation_function", default="silu"))
        latent = getattr(text, "kv_lora_rank", None) is not None
        return cls(
            name=name,
            layers=size("num_hidden_layers", "n_layer", "n_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads if latent else size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=hidden // heads),
            intermediate=inside,
            vocab=size("vocab_size"),
            gated=activation in ("silu", "swish", "swiglu", "gelu_pytorch_tanh"),
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            experts=experts,
            experts_per_token=size("num_experts_per_tok", default=0) if experts else 0,
            shared_intermediate=shared if experts else 0,
            dense_layers=size("first_k_dense_replace", default=0) if experts else 0,
            dense_intermediate=wide if experts else 0,
            latent_attention=latent,
        )


def _shape(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **rest: Any
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rest.pop("head_dim", hidden // heads),
        intermediate=intermediate,
        vocab=vocab,
        **rest,
    )


# From the config.json that their makers publish; gpt3-175b: arXiv:2005.14165.
SHAPES = {
    shape.name: shape
    for shape in (
        _shape("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
        _shape("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        _shape("llama-2-70b", 80, 8192, 64, 8, 28672, 32000),
        _shape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256),
        _shape("llama-3-70b", 80, 8192, 64, 8, 28672, 128256),
        _shape("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
        _shape("qwen3-8b", 36, 4096, 32, 8, 12288, 151936),
        _shape("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
        _shape("qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151936, head_dim=128, experts=128, experts_per_token=8),
        _shape("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2),
        _shape("gpt3-175b", 96, 12288, 96, 96, 49152, 51200, gated=False, tied=True),
    )
}


def find_shape(given: str | Path | ModelShape | Any) -> ModelShape:
    """A ModelShape: itself, by a name in SHAPES, of a folder or config.json of a transformers model, or of its config.

    Raises:
        ValueError: there is no such name or file, or it has no sizes of a decoder.

    Example:
        >>> find_shape("qwen3-8b").layers
        36
    """
    if isinstance(given, ModelShape):
        return given
    if hasattr(given, "get_text_config"):
        return ModelShape.from_config(given)
    if str(given).lower() in SHAPES:
        return SHAPES[str(given).lower()]
    if not Path(given).exists():
        near = difflib.get_close_matches(str(given).lower(), SHAPES, 1)
        raise ValueError(
            f"{str(given)!r} is no model that is known by name, and no file. "
            + (f"Did you mean {near[0]!r}?" if near else f"Known are {listed(SHAPES)}; or name a config.json.")
        )
    from transformers import AutoConfig

    path = Path(given).resolve()
    try:
        shape = ModelShape.from_config(AutoConfig.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{given} holds no config of a transformers model: {error}") from error
    return replace(shape, name=(path if path.is_dir() else path.parent).name)
