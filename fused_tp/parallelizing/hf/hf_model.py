"""Sharding of transformers models: limits, names of arguments, padding, packed documents, and the loss.

A model's attention is selected by its config, not patched: see `hf_attention`. Only the attention of a few families,
which compute it by their own code, is patched over context parallel ranks: see `own_attention`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fused_tp.attention.spec import read_bounds
from fused_tp.core.partition import shard_range
from fused_tp.ops.collectives import gather
from fused_tp.parallelizing.families import family_of
from fused_tp.parallelizing.forward_shard import ForwardShard
from fused_tp.parallelizing.hf import scored_tokens
from fused_tp.parallelizing.hf.hf_attention import has_eager, register_attention, register_mask, replace_own_attention
from fused_tp.parallelizing.hf.hf_cache import CachedPass, cached_pass, is_shared
from fused_tp.parallelizing.hf.hf_later_calls import adapt_later_calls
from fused_tp.parallelizing.hf.state_layers import STATE_LAYERS, find_state_layers, pass_states_on
from fused_tp.parallelizing.outputs import map_tensors
from fused_tp.parallelizing.readers import attentions_named, forward_mentions
from fused_tp.parallelizing.sequence_sharding import PASSES_ON, Parallelism, RowMasks, SequenceSharding, sharded_head
from fused_tp.parallelizing.shard_plan import Style, spec_of
from fused_tp.parallelizing.state_dict import save_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

# Optional outputs of a model, one entry per token or a mean over tokens.
EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# The registry through which a model calls the attention that its config names.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# A model that changes its mask requests one from transformers with this argument, even if attention needs none.
OWN_MASK = "allow_is_causal_skip=False"
# These name attentions only in code that no forward pass over context parallel ranks runs.
NAMES_HARMLESSLY = ("Gemma4TextModel", "Gemma4UnifiedTextModel")
PADDED_DOCUMENTS = (
    "attention_mask has padding in rows of packed documents; make the padding a document of its own and leave the mask "
    "out."
)


def is_transformers_model(model: nn.Module) -> bool:
    """True if `model` is a transformers model. Does not import transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def without_input_hooks(model: nn.Module) -> Iterator[None]:
    """Remove the embedding hooks of gradient_checkpointing_enable; on exit, hook the embeddings that exist then."""
    users: Any = model
    if not getattr(model, "_require_grads_hooks", None):
        yield
        return
    users.disable_input_require_grads()
    try:
        yield
    finally:
        users.enable_input_require_grads()


def check_transformers_model(model: PreTrainedModel, plan: Mapping[str, Style], parallelism: Parallelism) -> None:
    """Refuse a model whose attention, mask or loss is not supported, before anything is changed.

    Raises:
        ValueError: the message names the unsupported part and a remedy.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    kind = type(model).__name__
    is_base = _is_base(model)
    asked = "a cp_dim of more than one rank" if parallelism.cp_mesh is not None else "sequence_parallel=True"
    if parallelism.shards_sequence:
        _check_token_mixing(model, parallelism, asked)
        _check_no_layers_dropped(model, asked)
        makes_masks = parallelism.cp_mesh is not None and not _own_attention(model)
        if makes_masks and any(
            forward_mentions(m, OWN_MASK, unknown=False) for m in model.modules() if is_transformers_model(m)
        ):
            raise ValueError(f"{kind} adds a mask of its own to attention, which context parallel ranks do not serve.")
        # transformers uses ForCausalLMLoss for classes without a loss type, whose names do not end in ForCausalLM.
        own_name = model.loss_type is None and model.get_output_embeddings() is not None
        if not (is_base or own_name or model.loss_type == "ForCausalLM"):
            raise ValueError(
                f"{kind} is neither a causal language model nor a base model; {asked} serves only these. Leave it out."
            )
    if parallelism.computes_loss and not is_base and model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{kind} has the loss function {model.loss_function}; loss_parallel and cp_dim compute the mean cross "
            "entropy of ForCausalLMLoss themselves. Compute another loss from the logits instead: call the model "
            "without labels."
        )
    if parallelism.computes_loss and not is_base and not forward_mentions(model, "loss_function", unknown=True):
        raise ValueError(
            f"{kind}.forward computes its loss by other means than self.loss_function, which loss_parallel and cp_dim "
            "replace by the loss over all ranks. Use neither, or give the class a forward that calls it."
        )
    has_head = not (is_base or hasattr(model, PASSES_ON))
    if has_head and (parallelism.sequence_parallel or parallelism.loss_parallel):
        head = model.get_output_embeddings()
        name = next((name for name, module in model.named_modules() if module is head), None)
        spec = spec_of(None if name is None else plan.get(name))
        if spec.shard_dim != 0 or spec.parts > 1 or spec.shares_keys:
            asked = "sequence_parallel" if parallelism.sequence_parallel else "loss_parallel"
            raise ValueError(
                f"{asked}=True needs the output layer of {kind} ({name!r}) sharded by columns; add "
                f"{{{name or 'lm_head'!r}: 'colwise_gather_output'}} to the plan."
            )


def _check_token_mixing(model: PreTrainedModel, parallelism: Parallelism, asked: str) -> None:
    """Refuse attention that cannot be replaced and, over context parallel ranks, unknown layers with a state."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind, over_cp = type(model).__name__, parallelism.cp_mesh is not None
    family, own = family_of(model.config), over_cp and bool(_own_attention(model))
    states = over_cp and bool(find_state_layers(model))
    others = _other_layers(model)
    if over_cp and others and not states:
        raise ValueError(
            f"{kind} has layers that mix tokens by other means than attention ({', '.join(others)}); {asked} serves "
            f"only those of {', '.join(sorted(STATE_LAYERS))}, where no kernel from the hub has replaced their "
            "forward. Use no cp_dim."
        )
    if states and not has_eager(model):
        return  # no attention at all
    implementation = model.config._attn_implementation
    is_eager, by_itself = implementation == "eager", own or (not over_cp and family.eager_sequences)
    # transformers sets `_supports_attention_backend` to False for all models with a state, whatever their attention.
    # modeling_utils, where the base class is defined, always has INTERFACE.
    kinds = (one for one in type(model).__mro__ if one.__module__ != "transformers.modeling_utils")
    files = (sys.modules.get(one.__module__) for one in kinds)
    replaceable = model._supports_attention_backend or states
    named = not over_cp or family.names_attention  # a file may look up the attention of some of its modules only
    replaceable = replaceable or own or (named and any(hasattr(file, INTERFACE) for file in files))
    if not (replaceable or (by_itself and is_eager)):
        found = ((name, type(m).__name__) for name, m in model.named_modules() if "Attention" in type(m).__name__)
        name, attention = next(found, ("", kind))
        eager = not is_eager and (family.attention is not None if over_cp else by_itself)
        raise ValueError(
            f"{kind} does not let its attention be replaced: {name!r} ({attention}) is not known to take it from "
            f"transformers' AttentionInterface, which {asked} needs. "
            + ("Use no cp_dim" if over_cp else "Pass sequence_parallel=False")
            + (", or load it with attn_implementation='eager'." if eager else ".")
        )
    known = by_itself or has_eager(model) if is_eager else implementation in ALL_ATTENTION_FUNCTIONS
    if not known:
        raise ValueError(
            f"{kind} uses attn_implementation={implementation!r}, which is not one of transformers' "
            f"AttentionInterface; {asked} needs it loaded with one, such as attn_implementation='sdpa'."
        )
    if over_cp:
        _check_attention_named(model, implementation)


def _check_attention_named(model: PreTrainedModel, implementation: str) -> None:
    """Refuse modules with special code for the attention that the config names, since ours will replace it."""
    own = {id(module) for module in _own_attention(model)}
    for name, module in model.named_modules():
        if id(module) in own or type(module).__name__ in NAMES_HARMLESSLY:
            continue
        if implementation in attentions_named(module):
            raise ValueError(
                f"{name!r} ({type(module).__name__}) does something of its own where the config's attention is "
                f"{implementation!r}, such as to select tokens, and attention over context parallel ranks does not "
                "know of it. Use no cp_dim."
            )


def _check_no_layers_dropped(model: PreTrainedModel, asked: str) -> None:
    """Refuse layers that training drops at random. Even ranks with equal seeds would drop different layers, once parts
    of different length have made dropout draw different amounts of random numbers. A message would then reach another
    layer on its peer, and not always fail."""
    chances = {name: getattr(module, "layerdrop", 0.0) for name, module in model.named_modules()}
    dropping = next((name for name, chance in chances.items() if isinstance(chance, int | float) and chance > 0), None)
    if dropping is not None:
        raise ValueError(
            f"{type(model).__name__} leaves out layers at random in training ({dropping!r} has "
            f"layerdrop={chances[dropping]}), and ranks that hold different tokens would leave out different ones, so "
            f"{asked} does not serve it. Set model.get_submodule({dropping!r}).layerdrop = 0.0, or leave it out."
        )


def _own_attention(model: PreTrainedModel) -> list[nn.Module]:
    """Modules with their own attention code, if we have a replacement for context parallel ranks."""
    own = family_of(model.config).attention
    causal = getattr(model.config, "is_causal", True)  # transformers' masks read it; our attention has no mask
    return [] if own is None or not causal else own.modules_of(model)


def _other_layers(model: PreTrainedModel) -> list[str]:
    """Kinds of layers that mix tokens by other means than attention."""
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(layers) - {"full_attention", "sliding_attention", "chunked_attention"})
    # transformers' flag for models with a state; some such models lack it.
    return others or ["a state"] * bool(getattr(model, "_is_stateful", False))


def _is_base(model: PreTrainedModel) -> bool:
    """True if `model` returns hidden states, and no logits or loss. (`model.base_model is model` is not enough: it is
    also True if the class lacks the part that `base_model_prefix` names, as Llama4ForCausalLM does.)"""
    forwards = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    takes_labels = any("labels" in inspect.signature(forward).parameters for forward in forwards)
    # Question answering models have a loss, but other names for their labels.
    return not takes_labels and model.loss_type is None and model.get_output_embeddings() is None


class TransformersSequence(SequenceSharding):
    """Sequence sharding of transformers models: names of arguments, and checks for unsupported ones."""

    tokens = ("input_ids", "inputs_embeds")
    positions = "position_ids"
    labels = "labels"
    caches = ("past_key_values", "cache_params", "state")  # for attention, state spaces, RWKV

    def __init__(self, model: PreTrainedModel, parallelism: Parallelism) -> None:
        super().__init__(model, parallelism)
        self.is_base = _is_base(model)
        self.config = model.config
        self.family = family_of(model.config)
        self.other_layers = _other_layers(model)
        self.own_attention = _own_attention(model) if parallelism.cp_mesh is not None else []
        # Models like RoBERTa start to count positions after the position of padding.
        counts = (m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids"))
        self._counts_positions: Any = next(counts, None)
        self._serves_logits = False  # True if router logits can be returned
        self._router_logits: Any = None  # router logits of all tokens in the last forward pass
        self._scored: scored_tokens.Targets | None = None  # set in a forward pass that returns their log-probabilities
        self._attentions: list[tuple[Any, str]] = []  # (config, its attention) after `adapt`

    def prepare(self, model: PreTrainedModel) -> None:
        """Make layers with a state receive it from the ranks that hold the preceding tokens."""
        if self.parallelism.cp_mesh is not None:
            pass_states_on(find_state_layers(model))

    def adapt(self, model: PreTrainedModel) -> None:
        """Switch the model to our attention, masks and loss. Call it after its layers were replaced."""
        parallelism = self.parallelism
        self.head = sharded_head(model.get_output_embeddings())
        if parallelism.tp_mesh is not None:
            model._tp_size = parallelism.tp_mesh.size()  # generate() sizes a static KV cache by it
            adapt_later_calls(model)
        save_whole(model)
        if parallelism.shards_sequence:
            _own_config(model)
            self.config = model.config  # callers change its attributes: use_cache, ...
            if self.family.attention is not None:
                replace_own_attention(self.own_attention, self.family.attention)
            if parallelism.cp_mesh is not None:
                model.config._attn_implementation = register_attention(model, self)
            configs: Any = {id(m.config): m.config for m in model.modules() if is_transformers_model(m)}.values()
            for config in configs if parallelism.cp_mesh is None else ():
                register_mask(config)
            self._attentions = [(config, config._attn_implementation) for config in configs]
        for name in self.family.embeds if parallelism.cp_mesh is not None else ():
            model.base_model.get_submodule(name).register_forward_pre_hook(partial(_count_all_tokens, self))
        if parallelism.cp_mesh is not None:
            for rotary in filter(_depends_on_length, model.modules()):
                self.asks_last_position = True
                rotary.register_forward_pre_hook(partial(_add_last_position, self), with_kwargs=True)
                rotary.register_forward_hook(partial(_drop_last_position, self))
        if parallelism.computes_loss and not self.is_base:
            model.loss_function = self.global_loss(model.loss_function)
        if parallelism.sequence_parallel and not self.joins:
            model.base_model.register_forward_hook(self._gather_scored)
        inner = self.entrances(model)
        if parallelism.tp_mesh is not None and not (parallelism.computes_loss or self.is_base or len(inner) > 1):
            routers = _recorded_routers(model, inner[0])
            whole = all(map(self.is_whole, routers))
            if routers and (whole or all(map(self.flattens, routers))):
                self._serves_logits = True
                inner[0].register_forward_hook(partial(self._note_logits, whole))

    def _note_logits(self, whole: bool, base: nn.Module, args: Any, output: Any) -> None:
        """Replace the router logits in the output of `base`, if present, with those of all tokens, in order.
        `whole`: they already cover all tokens, since routers run on the whole sequence."""
        state, logits = self.state_now(), getattr(output, "router_logits", None)
        if not state.tp_sharded or logits is None:
            return
        if not whole:
            rows = (t.unflatten(0, (state.batch, -1)) for t in logits)
            mesh, length = self.parallelism.tp_mesh, state.local_len
            logits = tuple(gather(t, 1, group=mesh, gather_size=length).flatten(0, 1) for t in rows)
        output["router_logits"] = self._router_logits = logits
        self._head_outputs.note_whole(logits)

    def _targets(self, arguments: dict[str, Any], tokens: Tensor, ignore_index: int) -> Tensor | None:
        self._scored = None
        if not arguments.get(scored_tokens.ASKED):
            return super()._targets(arguments, tokens, ignore_index)
        if self.parallelism.shards_sequence:
            self._scored = scored_tokens.take_targets(arguments, ignore_index)
        return None

    def _gather_scored(self, base: nn.Module, args: Any, output: Any) -> None:
        state = self.state_now()
        if self._scored is not None and state.tp_sharded:
            mesh, length = self.parallelism.tp_mesh, state.local_len
            output.last_hidden_state = gather(output.last_hidden_state, 1, group=mesh, gather_size=length)

    def attention_layers(self, model: nn.Module) -> int:
        text, (state, _) = type(self.config.get_text_config()), STATE_LAYERS.get(self.config.model_type, ("", None))
        return sum(
            type(module).__name__.endswith("Attention")
            and type(module).__name__ != state
            and type(getattr(module, "config", None)) is text  # others are for images and audio, which are not sharded
            for module in model.modules()
        )

    def is_cached(self, arguments: dict[str, Any]) -> bool:
        return super().is_cached(arguments) or arguments.get("use_cache") is True

    def cache_types(self, arguments: dict[str, Any]) -> tuple[type, ...]:
        from transformers import Cache

        return (*super().cache_types(arguments), Cache)

    def check(self, arguments: dict[str, Any], seq_len: int, targets: Tensor | None) -> RowMasks:
        if not self.parallelism.shards_sequence:
            return RowMasks()
        self._check_attention()
        for name in EXTRA_OUTPUTS:
            asked = arguments.get(name)
            served = name == "output_router_logits" and self._serves_logits
            if not served and (getattr(self.config, name, False) if asked is None else asked):
                raise ValueError(
                    f"{name}=True is not served where the sequence is sharded over ranks (sequence_parallel, cp_dim): "
                    f"each rank has only a part. Pass {name}=False (TRL asks for router logits unless "
                    "router_aux_loss_coef=0.0)."
                )
        makes_cache = self._turn_cache_off(arguments)
        if self.parallelism.cp_mesh is None:
            self._check_padding(arguments)
            check_documents(arguments, seq_len, makes_cache=makes_cache)
            if self.family.length_of_mask and arguments.get("attention_mask") is None:
                _, tokens = self.find_tokens(arguments)
                arguments["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
            return RowMasks()
        mask = arguments.get("attention_mask")
        # Check padding first: with padding on the left, positions look like those of packed documents.
        _, tokens = self.find_tokens(arguments)
        ignored = arguments.get("ignore_index", -100)
        padded = mask is not None and check_no_padding_matters(mask, tuple(tokens.shape[:2]), targets, ignored)
        documents = self._take_documents(arguments, seq_len, makes_cache=makes_cache)
        arguments.pop("attention_mask", None)
        if padded and documents:
            raise ValueError(PADDED_DOCUMENTS)
        return RowMasks(padded, documents)

    def _check_attention(self) -> None:
        """Refuse an attention that was set after `adapt`: it would see this rank's tokens only."""
        for config, ours in self._attentions:
            if config._attn_implementation != ours:
                raise ValueError(
                    f"The model's attention was set to {config._attn_implementation!r} after parallelize, which had "
                    f"set it to {ours!r}, attention over ranks. Set it before parallelize, or back to {ours!r}."
                )

    def _check_padding(self, arguments: dict[str, Any]) -> None:
        """Remove a mask without padding and refuse others, because layers with a state would receive a shard of it."""
        mask = arguments.get("attention_mask")
        if not self.other_layers or not isinstance(mask, Tensor) or mask.ndim != 2:
            return
        if not bool(mask.all()):
            raise ValueError(
                f"attention_mask has padding, which layers with {', '.join(self.other_layers)} are not given with "
                "sequence_parallel=True. Use rows of equal length, or sequence_parallel=False."
            )
        arguments["attention_mask"] = None

    def _take_documents(self, arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> tuple[int, ...]:
        documents = take_documents(arguments, seq_len, makes_cache=makes_cache)
        if not self.other_layers:
            return documents
        if len(_distinct(documents)) > 2:
            raise ValueError(
                f"Rows hold packed documents (by position_ids or cu_seq_lens_q), and layers with "
                f"{', '.join(self.other_layers)} would carry their state from one to the next over context parallel "
                "ranks. Use rows of one document, padded on the right, or no cp_dim."
            )
        return ()

    def _turn_cache_off(self, arguments: dict[str, Any]) -> bool:
        """Turn the cache off, which the config may enable by default. Return True if it would have been on."""
        asked = arguments.get("use_cache")
        arguments["use_cache"] = False
        return bool(getattr(self.config.get_text_config(), "use_cache", False) if asked is None else asked)

    def check_unsharded(self, arguments: dict[str, Any], seq_len: int) -> None:
        documents = self._take_documents(arguments, seq_len, makes_cache=self._turn_cache_off(arguments))
        if not documents:
            return
        mask, positions = arguments.pop("attention_mask", None), arguments.get("position_ids")
        if mask is not None and not bool(mask.all()):
            raise ValueError(PADDED_DOCUMENTS)
        if positions is None or not bool((positions.diff(dim=-1) != 1).any()):
            # transformers separates documents by their positions if there is neither a mask nor a cache.
            counted = [torch.arange(stop - start, device="cpu") for start, stop in itertools.pairwise(documents)]
            source = next(arguments[name] for name in self.tokens if arguments.get(name) is not None)
            arguments["position_ids"] = torch.cat(counted).to(source.device).unsqueeze(0)

    def is_too_short(self, seq_len: int) -> bool:
        mesh = self.parallelism.tp_mesh
        needs_tokens = self.family.eager_sequences or self.family.needs_tokens
        if mesh is not None and self.parallelism.sequence_parallel and needs_tokens:
            cp_ranks = 1 if self.parallelism.cp_mesh is None else self.parallelism.cp_mesh.size()
            # The two lengths that parts of context parallel ranks may have.
            for tokens in (seq_len // cp_ranks, -(-seq_len // cp_ranks)):
                start, stop = shard_range(tokens, mesh.size(), mesh.size() - 1)
                if start == stop:  # on no tokens their own code fails in a view [-1, 0, hidden]
                    return True
        return super().is_too_short(seq_len)

    def entrances(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if module is not model and is_transformers_model(module)]

    def default_positions(self, tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
        counts, mask = self._counts_positions, arguments.get("attention_mask")
        if self.family.positions_of_mask and isinstance(mask, Tensor) and mask.ndim == 2:
            return (mask.long().cumsum(1) * mask - 1).long()
        if counts is None:
            return super().default_positions(tokens, arguments).unsqueeze(0)
        given = "input_ids" if tokens.ndim == 2 else "inputs_embeds"
        positions: Tensor = getattr(counts, f"create_position_ids_from_{given}")(tokens, counts.padding_idx)
        return positions

    def open_cache(self, model: nn.Module, arguments: dict[str, Any], new: int) -> CachedPass | None:
        held = arguments.get("past_key_values")
        if held is None and arguments.get("use_cache") is not True:
            return None
        if is_shared(held):
            self._check_shared(model, arguments)
        elif not self._may_share_cache(model, arguments):
            return None
        self._check_attention()
        assert self.parallelism.cp_mesh is not None  # checked by the caller
        return cached_pass(arguments, new, self.parallelism.cp_mesh, self.config)

    def _check_shared(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        """Refuse calls that attention over an already shared cache does not support."""
        if model.training:
            raise ValueError(
                "The context parallel ranks share the cache that was given, which is not for training: call "
                "model.eval(), or leave past_key_values out."
            )
        if self._gives_attentions(arguments):
            raise ValueError(
                "output_attentions=True is not served with a cache that the context parallel ranks share: no rank has "
                "all weights. Leave it out, or give it in the pass that makes the cache; every rank then holds all."
            )

    def _gives_attentions(self, arguments: dict[str, Any]) -> bool:
        asked = arguments.get("output_attentions")
        return bool(getattr(self.config, "output_attentions", False) if asked is None else asked)

    def _may_share_cache(self, model: nn.Module, arguments: dict[str, Any]) -> bool:
        """True if attention over a sharded cache computes the model's attention. It has no gradient and supports only
        causal masks and windows. Tensors of unknown names may change the masks, so they exclude it."""
        text = self.config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or ())
        known = {*self.tokens, *self.known, self.positions, self.labels, "attention_mask", "cache_position"}
        return not (
            torch.is_grad_enabled()
            or model.training
            or self.config.is_encoder_decoder
            or kinds - {"full_attention", "sliding_attention"}
            or self.other_layers  # such a cache does not hold their state
            or getattr(text, "num_kv_shared_layers", None)
            or not all(family_of(one).shares_cache for one in (text, self.config))
            or getattr(text, "kv_lora_rank", None)  # the cache holds latents, from which keys and values are computed
            or arguments.get("is_causal") is not None
            or self._gives_attentions(arguments)
            or any(isinstance(value, Tensor) and name not in known for name, value in arguments.items())
        )

    def extra_arguments(self, shard: ForwardShard | None) -> dict[str, Any]:
        if shard is None:
            return {}
        scored = {} if self._scored is None else {"shift_labels": scored_tokens.own_targets(self._scored, shard)}
        if shard.cp is None:
            return scored
        # With a mask (which `_mask` drops), transformers does not take the gaps in a rank's positions for ends of
        # packed documents.
        ones = torch.ones((shard.batch, shard.local_len), dtype=torch.bool, device=shard.cp.mesh.device_type)
        return {"attention_mask": ones, **scored}

    def unshard_output(self, output: Any, shard: ForwardShard) -> Any:
        if not self.parallelism.shards_sequence:
            return output
        if self._scored is not None:
            whole = partial(self.whole, shard=shard)
            return scored_tokens.whole_scores(output, shard, whole, self._scored)
        key: str | int = "last_hidden_state" if self.is_base else "logits"
        parts = dict(enumerate(output) if isinstance(output, tuple) else dict(output).items())
        if isinstance(output, tuple):  # losses, which are scalars, come first
            key = next((n for n, value in enumerate(output) if isinstance(value, Tensor) and value.ndim), 0)
        for name, value in parts.items():
            if name == key:
                parts[name] = self._main_output(value, shard)
            elif self.is_base and isinstance(value, Tensor):
                raise ValueError(
                    f"The model returns a tensor {name!r} next to {key!r}, made of this rank's part of the sequence; "
                    "how to make the whole one of it is not known. Turn it off (a pooler by add_pooling_layer=False), "
                    "or use neither cp_dim nor sequence_parallel."
                )
            elif value is not self._router_logits:  # these cover all tokens already
                parts[name] = map_tensors(lambda t: self.whole_of_tokens(t, shard), value)
        self._router_logits = None  # frees their autograd graph
        if isinstance(output, tuple):
            return tuple(parts.values())
        for name, value in parts.items():
            output[name] = value
        return output

    def _main_output(self, t: Tensor, shard: ForwardShard) -> Tensor:
        """Gather the main output: hidden states of a base model, logits of another model."""
        if not self.is_base:
            t = self.whole_of_tokens(t, shard)
        else:
            t = self.whole(t, shard, tp_sharded=self.parallelism.sequence_parallel and not self.joins)
        keep = shard.logits_to_keep
        if isinstance(keep, Tensor) or keep != 0:
            t = t[:, slice(-keep, None) if isinstance(keep, int) else keep]
        return t


def _recorded_routers(model: nn.Module, base: Any) -> list[str]:
    """Names of the modules whose outputs transformers records as router logits; empty if they are unknown."""
    recorded = base.can_record_outputs.get("router_logits", ())
    kinds: list[Any] = [
        getattr(one, "target_class", one) for one in (recorded if isinstance(recorded, list | tuple) else [recorded])
    ]
    if not all(isinstance(kind, type) for kind in kinds):
        return []
    return [name for name, module in model.named_modules() if isinstance(module, tuple(kinds))]


def _depends_on_length(module: nn.Module) -> bool:
    """True if `module` is a rotary embedding whose frequencies depend on the greatest position it receives."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _add_last_position(
    sequence: SequenceSharding, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Append the greatest position of the whole sequence, so that all ranks compute the same frequencies."""
    cp = sequence.state_now().cp
    last = None if cp is None else cp.last_position
    if last is None:
        return None

    def with_last(positions: Tensor) -> Tensor:
        return torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], -1)

    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": with_last(kwargs["position_ids"])}
    x, positions, *rest = args
    return (x, with_last(positions), *rest), kwargs


def _drop_last_position(sequence: SequenceSharding, rotary: nn.Module, args: Any, output: Any) -> Any:
    """Drop the entry of the appended position from outputs [..., seq, width]."""
    cp = sequence.state_now().cp
    return output if cp is None or cp.last_position is None else map_tensors(lambda t: t[..., :-1, :], output)


def _count_all_tokens(sequence: SequenceSharding, positions: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Raise the past length that XGLM receives, so that its table of positions covers the tokens of all ranks."""
    cp, (own, *_) = sequence.state_now().cp, args
    return args if cp is None else (own, cp.seq_len - own.shape[1])


def _own_config(model: PreTrainedModel) -> None:
    """Copy the config of `model`: transformers shares one object between all models built from it, and the others must
    keep their attention."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        held: Any = module.__dict__.get("config")
        if id(held) in copies:
            module.config = copies[id(held)]


def check_no_padding_matters(mask: Any, tokens: tuple[int, ...], targets: Tensor | None, ignore_index: int) -> bool:
    """Accept a mask that causal attention over a ring does not need: no padding, or padding on the right (True).

    Causal attention does not see padding on the right of a token. The model's output at the padding itself differs from
    its output with the mask, so targets there must be `ignore_index`.

    Args:
        tokens: (batch, seq) of the masked tokens.

    Raises:
        ValueError: any other mask, or targets at padding.
    """
    given = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in (tokens, (1, *tokens[1:])):
        raise ValueError(
            f"attention_mask is {given}; over context parallel ranks only [batch, seq] is served, here {tokens}, "
            "causal attention with padding on the right."
        )
    mask = mask.expand(tokens)
    keep = mask.bool()
    if bool(keep.all()):
        return False
    if bool((keep[:, 1:] & ~keep[:, :-1]).any()):
        raise ValueError(
            "attention_mask has padding on the left of tokens, or holes; over context parallel ranks attention takes "
            "no padding mask. Pad on the right (tokenizer.padding_side='right'), or, to generate, pass use_cache=True."
        )
    if targets is not None and bool((targets[~keep] != ignore_index).any()):
        raise ValueError(
            "labels count at padding positions; over context parallel ranks padding is not masked, so set the labels "
            f"of padding to {ignore_index}."
        )
    return True


# ---- packed documents -----------------------------------------------------------------------------------------------
#
# Without a mask and a cache, transformers treats positions [1 or batch, seq] that do not count up by one as packed
# documents that do not see each other. Packing ("padding-free") data collators produce such positions, and may pass
# `cu_seq_lens_q` and its companions, which transformers' flash attention reads. Here documents never see each other.
# That includes the few models (gpt-oss) where only flash attention separates documents, since their masks for sdpa and
# eager ignore positions.

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
NUMBERS = "seq_idx"  # [batch, seq], document index of each token, for kernels of state spaces


def take_documents(arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> tuple[int, ...]:
    """Return the bounds (0, ..., seq_len) of the documents in each row, () for one; remove BOUNDS from `arguments`.

    `makes_cache`: transformers would collect keys and values, requested or by default.

    Raises:
        ValueError: rows hold different documents, two descriptions disagree, `seq_idx` alone describes documents, or
            positions alone do in a call in which transformers would not read them as documents.
    """
    bounds = _from_bounds({name: arguments.pop(name, None) for name in BOUNDS}, seq_len)
    numbers = arguments.pop(NUMBERS, None)
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    counted = () if positions is None or positions.shape[-1] != seq_len else _from_positions(positions, mask)
    if counted and not bounds:
        _check_known_apart(mask, makes_cache)
    if bounds and counted and _distinct(bounds) != _distinct((*counted, seq_len)):
        raise ValueError(
            f"cu_seq_lens_q has documents that begin at {_few(bounds[:-1])}, and position_ids start again at "
            f"{_few(counted)}; they must describe the same documents."
        )
    if numbers is not None and not bounds and not counted and bool((numbers.diff(dim=-1) != 0).any()):
        raise ValueError(
            f"{NUMBERS} has several documents in a row, and neither position_ids nor cu_seq_lens_q do; over context "
            "parallel ranks these say where documents begin. Pass position_ids that start again at each."
        )
    return bounds or ((*counted, seq_len) if counted else ())


def check_documents(arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> None:
    """Check documents of a forward pass without a ring, in which transformers itself may separate documents.

    Without the cache, which is turned off here, transformers would separate documents that see each other with it.
    """
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if not makes_cache or positions is None or positions.shape[-1] != seq_len or arguments.get(BOUNDS[0]) is not None:
        return
    if positions.ndim == 2 and mask is None and bool((positions.diff(dim=-1) != 1).any()):
        _check_known_apart(mask, makes_cache)


def _check_known_apart(mask: Tensor | None, makes_cache: bool) -> None:
    if makes_cache or mask is not None:
        # Here flash attention still separates documents, while masks of sdpa and eager let them see each other.
        raise ValueError(
            "position_ids start again inside of rows, as those of packed documents do. Whether these documents see "
            "each other depends on transformers' attention where there is an attention_mask or use_cache is on, which "
            "it is by default. Pass use_cache=False and no attention_mask: documents then see only themselves. (Or "
            "pass their bounds, cu_seq_lens_q.)"
        )


def _from_bounds(given: dict[str, Any], seq_len: int) -> tuple[int, ...]:
    queries, keys = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
    if queries is None:
        return ()
    queries = torch.as_tensor(queries, device="cpu")
    if keys is not None and torch.as_tensor(keys, device="cpu").tolist() != queries.tolist():
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ; tokens attend to those of the same rows.")
    return read_bounds("cu_seq_lens_q", queries, seq_len)


def _from_positions(positions: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """Starts (0, ...) of the documents that `positions` [seq], [rows, seq] or [.., rows, seq] count; () for one."""
    breaks = positions.diff(dim=-1) != 1
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == breaks.shape[:-1] + positions.shape[-1:]:
        breaks = breaks & mask[:, 1:].bool()  # positions of padding follow no rule
    if not bool(breaks.any()):
        return ()
    if positions.ndim > 2:
        raise ValueError(
            f"position_ids {tuple(positions.shape)} do not count up by one; over context parallel ranks only positions "
            "[batch, seq] may, those of packed documents."
        )
    rows = breaks.view(-1, breaks.shape[-1])
    if not bool((rows == rows[0]).all()):
        raise ValueError(
            "position_ids do not count up by one, and start again at other places in some rows than in others; over "
            "context parallel ranks all rows must be packed of documents of the same lengths. Pack into one long row."
        )
    return (0, *(rows[0].nonzero().flatten() + 1).tolist())


def _distinct(bounds: tuple[int, ...]) -> list[int]:
    return sorted(set(bounds))


def _few(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"({shown}, ...)" if len(numbers) > 8 else f"({shown})"
