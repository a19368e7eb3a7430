"""The sizes of a decoder that decide what it costs and how it can be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
