"""Sequence sharding of transformers models: supported models, argument names, padding, packed documents, and the loss.

Most models look up their attention by a name in their config, so our attention is selected by a new name there: see
`hf_attention`. A few families compute attention by their own code, which is patched instead: see `custom_attention`.
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
import torch.nn.functional as F
from torch import Tensor, nn

from fused_tp.attention.spec import read_bounds
from fused_tp.core.partition import shard_range
from fused_tp.ops.collectives import gather
from fused_tp.parallelizing.families import find_family
from fused_tp.parallelizing.forward_shard import ForwardShard
from fused_tp.parallelizing.hf import scored_tokens
from fused_tp.parallelizing.hf.hf_attention import (
    cp_context_of,
    has_eager_attention,
    is_original_attention_replaced,
    register_attention,
    register_mask,
    replace_custom_attention,
)
from fused_tp.parallelizing.hf.hf_cache import CachedPass, is_sharded, make_cached_pass
from fused_tp.parallelizing.hf.hf_latents import connect_latents, find_selecting_modules
from fused_tp.parallelizing.hf.hf_later_calls import adapt_later_calls, enable_continuous_batching
from fused_tp.parallelizing.hf.state_layers import STATE_LAYERS, connect_states, find_state_layers
from fused_tp.parallelizing.outputs import map_tensors
from fused_tp.parallelizing.readers import compared_attention_names, forward_source_contains
from fused_tp.parallelizing.sequence_sharding import (
    INNER_STAGE_ATTRIBUTE,
    Parallelism,
    RowMasks,
    SequenceSharding,
    sharded_head,
)
from fused_tp.parallelizing.shard_plan import Style, spec_of
from fused_tp.parallelizing.state_dict import save_full_model_in_save_pretrained

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

# Optional outputs of a model that depend on the tokens, so that a rank has them for its own tokens only.
PER_TOKEN_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# Name of the registry in which a model looks up the attention that its config names.
ATTENTION_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
# Source text in the forward of models that change their mask: it makes transformers build one in any case.
CUSTOM_MASK_SOURCE = "allow_is_causal_skip=False"
# Classes whose code for specific attention names never runs in a forward pass over context parallel ranks.
CLASSES_WITHOUT_SPECIAL_CODE = ("Gemma4TextModel", "Gemma4UnifiedTextModel")
PADDED_DOCUMENTS_ERROR = (
    "attention_mask has padding in rows of packed documents, which is not supported. Make the padding a separate "
    "document and omit attention_mask."
)


def is_transformers_model(model: nn.Module) -> bool:
    """True if `model` is a transformers model. Does not import transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def without_input_hooks(model: nn.Module) -> Iterator[None]:
    """Remove the hooks that gradient_checkpointing_enable has set on embeddings; on exit, set them on the new ones."""
    untyped_model: Any = model
    if not getattr(model, "_require_grads_hooks", None):
        yield
        return
    untyped_model.disable_input_require_grads()
    try:
        yield
    finally:
        untyped_model.enable_input_require_grads()


def check_transformers_model(model: PreTrainedModel, plan: Mapping[str, Style], parallelism: Parallelism) -> None:
    """Check that the attention, mask and loss of `model` are supported, before anything is changed.

    Raises:
        ValueError: one of these is not supported; the message names it, and a remedy.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    class_name = type(model).__name__
    is_base = _is_base_model(model)
    option = "a cp_dim of more than one rank" if parallelism.cp_mesh is not None else "sequence_parallel=True"
    if parallelism.shards_sequence and model.config.is_encoder_decoder:
        raise ValueError(
            f"{class_name} is an encoder with a decoder, whose layers see two sequences. They support tensor "
            f"parallelism, but not {option}."
        )
    if parallelism.shards_sequence:
        _check_token_mixing(model, parallelism, option)
        _check_no_layers_dropped(model, option)
        makes_masks = parallelism.cp_mesh is not None and not (
            _custom_attention_modules(model) or find_selecting_modules(model)
        )
        if makes_masks and any(
            forward_source_contains(m, CUSTOM_MASK_SOURCE, default=False)
            for m in model.modules()
            if is_transformers_model(m)
        ):
            raise ValueError(
                f"{class_name} uses a custom attention mask, which a cp_dim does not support. Omit cp_dim."
            )
        # transformers finds no loss type for classes whose names do not end in ForCausalLM, and uses ForCausalLMLoss.
        has_unknown_loss = model.loss_type is None and model.get_output_embeddings() is not None
        if not (is_base or has_unknown_loss or model.loss_type == "ForCausalLM"):
            raise ValueError(
                f"{class_name} is neither a causal language model nor a base model; {option} supports only these. "
                f"Omit {option}."
            )
    if parallelism.computes_loss and not is_base and model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{class_name} has the loss function {model.loss_function}; loss_parallel and cp_dim support only the mean "
            "cross entropy of ForCausalLMLoss. To use another loss, call the model without labels and compute the loss "
            "from the logits."
        )
    if parallelism.computes_loss and not is_base and not forward_source_contains(model, "loss_function", default=True):
        raise ValueError(
            f"{class_name}.forward does not compute its loss by self.loss_function, which loss_parallel and cp_dim "
            "replace by the loss over all ranks. Omit both, or change the forward so that it calls self.loss_function."
        )
    has_head = not (is_base or hasattr(model, INNER_STAGE_ATTRIBUTE))
    unpadded_size = getattr(model.config.get_text_config(), "unpadded_vocab_size", None)
    if has_head and parallelism.loss_parallel and unpadded_size is not None:
        raise ValueError(
            f"{class_name} cuts its logits to the first {unpadded_size} entries of the vocabulary "
            "(config.unpadded_vocab_size), which loss_parallel distributes over the ranks. Omit loss_parallel."
        )
    if has_head and (parallelism.sequence_parallel or parallelism.loss_parallel):
        head = model.get_output_embeddings()
        name = next((name for name, module in model.named_modules() if module is head), None)
        spec = spec_of(None if name is None else plan.get(name))
        if spec.shard_dim != 0 or spec.num_parts > 1 or spec.shares_keys:
            option = "sequence_parallel" if parallelism.sequence_parallel else "loss_parallel"
            raise ValueError(
                f"{option}=True needs the output layer of {class_name} ({name!r}) sharded by columns; add "
                f"{{{name or 'lm_head'!r}: 'colwise_gather_output'}} to the plan."
            )


def _check_token_mixing(model: PreTrainedModel, parallelism: Parallelism, option: str) -> None:
    """Raise ValueError for attention that cannot be replaced and, with a cp_dim, for unknown layers with a state."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    class_name, is_over_cp = type(model).__name__, parallelism.cp_mesh is not None
    family, has_custom_attention = find_family(model.config), is_over_cp and bool(_custom_attention_modules(model))
    has_state_layers = is_over_cp and bool(find_state_layers(model))
    other_types = _find_non_attention_types(model)
    if is_over_cp and other_types and not has_state_layers:
        raise ValueError(
            f"{class_name} has layers that mix tokens by other means than attention ({', '.join(other_types)}); "
            f"{option} supports such layers only in {', '.join(sorted(STATE_LAYERS))}, and only if no kernel from "
            "the hub has replaced their forward. Omit cp_dim."
        )
    if has_state_layers and not has_eager_attention(model):
        return  # transformers has an eager function beside each attention: without one, the model has no attention
    implementation = model.config._attn_implementation
    is_eager, runs_unreplaced = (
        implementation == "eager",
        has_custom_attention or (not is_over_cp and family.supports_eager_sequences),
    )
    # State-space layers: transformers sets _supports_attention_backend to False for these models even where their
    # attention can be replaced. Skip modeling_utils: its source names ATTENTION_REGISTRY for every model.
    bases = (base for base in type(model).__mro__ if base.__module__ != "transformers.modeling_utils")
    model_files = (sys.modules.get(base.__module__) for base in bases)
    is_replaceable = model._supports_attention_backend or has_state_layers
    # Over CP ranks every attention module must use the interface. A file that contains ATTENTION_REGISTRY may also have
    # modules that do not use it, so only families marked `uses_configured_attention` are accepted.
    can_use_interface = not is_over_cp or family.uses_configured_attention
    is_replaceable = (
        is_replaceable
        or has_custom_attention
        or (can_use_interface and any(hasattr(file, ATTENTION_REGISTRY) for file in model_files))
    )
    if not (is_replaceable or (runs_unreplaced and is_eager)):
        attention_modules = (
            (name, type(m).__name__) for name, m in model.named_modules() if "Attention" in type(m).__name__
        )
        name, attention = next(attention_modules, ("", class_name))
        eager_would_help = not is_eager and (family.attention is not None if is_over_cp else runs_unreplaced)
        raise ValueError(
            f"the attention of {class_name} cannot be replaced: {name!r} ({attention}) is not known to use "
            f"transformers' AttentionInterface, which {option} needs. "
            + ("Omit cp_dim" if is_over_cp else "Pass sequence_parallel=False")
            + (", or load it with attn_implementation='eager'." if eager_would_help else ".")
        )
    is_known = runs_unreplaced or has_eager_attention(model) if is_eager else implementation in ALL_ATTENTION_FUNCTIONS
    if not is_known:
        raise ValueError(
            f"{class_name} uses attn_implementation={implementation!r}, which is not in transformers' "
            f"AttentionInterface, as {option} needs. Load the model with one that is, such as "
            "attn_implementation='sdpa'."
        )
    if is_over_cp:
        _check_special_attention_code(model, implementation)
        dropout = max((getattr(m, "attention_dropout", 0.0) for m in find_selecting_modules(model)), default=0.0)
        if dropout > 0:
            raise ValueError(
                f"{class_name} has attention_dropout={dropout} in attention to selected tokens, which a cp_dim does "
                "not support. Set config.attention_dropout to 0.0, or omit cp_dim."
            )


def _check_special_attention_code(model: PreTrainedModel, implementation: str) -> None:
    """Raise ValueError for modules with special code for the configured attention, which ours will replace."""
    custom_ids = {id(module) for module in (*_custom_attention_modules(model), *find_selecting_modules(model))}
    for name, module in model.named_modules():
        if id(module) in custom_ids or type(module).__name__ in CLASSES_WITHOUT_SPECIAL_CODE:
            continue
        if implementation in compared_attention_names(module):
            raise ValueError(
                f"{name!r} ({type(module).__name__}) runs special code if the config's attention is "
                f"{implementation!r}, for example to select tokens, which a cp_dim does not support. Omit cp_dim."
            )


def _check_no_layers_dropped(model: PreTrainedModel, option: str) -> None:
    """Raise ValueError if training drops layers at random.

    Ranks could drop different layers even with equal seeds, because dropout on shards of different length draws
    different amounts of random numbers. A message would then arrive in another layer of the peer, which may not fail.
    """
    probabilities = {name: getattr(module, "layerdrop", 0.0) for name, module in model.named_modules()}
    dropping_name = next(
        (
            name
            for name, probability in probabilities.items()
            if isinstance(probability, int | float) and probability > 0
        ),
        None,
    )
    if dropping_name is not None:
        raise ValueError(
            f"{type(model).__name__} drops layers at random in training ({dropping_name!r} has "
            f"layerdrop={probabilities[dropping_name]}), which {option} does not support, because ranks with different "
            f"tokens could drop different layers. Set model.get_submodule({dropping_name!r}).layerdrop = 0.0, or omit "
            f"{option}."
        )


def _custom_attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that compute attention by their own code, if we can replace it over context parallel ranks."""
    custom_attention = find_family(model.config).attention
    is_causal = getattr(model.config, "is_causal", True)  # our replacement is always causal
    return [] if custom_attention is None or not is_causal else custom_attention.find_modules(model)


def _find_non_attention_types(model: PreTrainedModel) -> list[str]:
    """Return the kinds of layers that mix tokens by other means than attention."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    attention_types = {"full_attention", "sliding_attention", "chunked_attention"}
    if find_selecting_modules(model):
        attention_types.add("indexed_attention")
    other_types = sorted(set(layer_types) - attention_types)
    # transformers' flag for models with a state; some such models lack it.
    return other_types or ["a state"] * bool(getattr(model, "_is_stateful", False))


def _is_base_model(model: PreTrainedModel) -> bool:
    """True if `model` returns hidden states, but no logits or loss.

    Rejected: `model.base_model is model`, which is also True if the class lacks the submodule that `base_model_prefix`
    names, as Llama4ForCausalLM does.
    """
    forwards = (vars(base)["forward"] for base in type(model).__mro__ if "forward" in vars(base))
    takes_labels = any("labels" in inspect.signature(forward).parameters for forward in forwards)
    # loss_type is checked too, because question answering models have a loss, but no argument named labels.
    return not takes_labels and model.loss_type is None and model.get_output_embeddings() is None


class TransformersSequenceSharding(SequenceSharding):
    """Sequence sharding of transformers models: argument names, and checks for unsupported arguments."""

    token_names = ("input_ids", "inputs_embeds")
    position_name = "position_ids"
    label_name = "labels"
    cache_names = ("past_key_values", "cache_params", "state")  # of attention, state spaces, RWKV

    def __init__(self, model: PreTrainedModel, parallelism: Parallelism) -> None:
        super().__init__(model, parallelism)
        self.is_base_model = _is_base_model(model)
        self.config = model.config
        self.family = find_family(model.config)
        self.non_attention_types = _find_non_attention_types(model)
        self.selects_tokens = bool(find_selecting_modules(model))
        self.custom_attention = _custom_attention_modules(model) if parallelism.cp_mesh is not None else []
        # Models like RoBERTa number positions from padding_idx + 1, by a method of their embeddings.
        position_counters = (m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids"))
        self._position_counter: Any = next(position_counters, None)
        self._returns_router_logits = False  # True if output_router_logits=True is supported
        self._router_logits: Any = None  # router logits of all tokens in the running forward pass
        self._scored_targets: scored_tokens.Targets | None = None  # targets of a pass that returns log-probabilities
        self._attention_names: list[tuple[Any, str]] = []  # (config, name of its attention) as `adapt` has set it

    def prepare(self, model: PreTrainedModel) -> None:
        """Make layers with a state receive the state from the ranks that hold the preceding tokens."""
        if self.parallelism.cp_mesh is not None:
            connect_states(find_state_layers(model))

    def adapt(self, model: PreTrainedModel) -> None:
        """Switch `model` to our attention, masks and loss. Call this after its layers have been replaced."""
        parallelism = self.parallelism
        self.head = sharded_head(model.get_output_embeddings())
        if parallelism.tp_mesh is not None:
            model._tp_size = parallelism.tp_mesh.size()  # generate() computes the size of a static KV cache from it
            adapt_later_calls(model)
            enable_continuous_batching(model, parallelism.tp_mesh, has_uneven_heads=bool(self.uneven_heads))
        save_full_model_in_save_pretrained(model)
        if parallelism.shards_sequence:
            _copy_config(model)
            self.config = model.config  # the same object, since callers change its attributes, such as use_cache
            if self.family.attention is not None:
                replace_custom_attention(self.custom_attention, self.family.attention)
            if parallelism.cp_mesh is not None:
                connect_latents(model, cp_context_of)
                model.config._attn_implementation = register_attention(model, self)
            configs: Any = {id(m.config): m.config for m in model.modules() if is_transformers_model(m)}.values()
            for config in configs if parallelism.cp_mesh is None else ():
                register_mask(config)
            self._attention_names = [(config, config._attn_implementation) for config in configs]
        for name in self.family.position_modules if parallelism.cp_mesh is not None else ():
            model.base_model.get_submodule(name).register_forward_pre_hook(partial(_extend_past_length, self))
        if parallelism.cp_mesh is not None:
            for rotary in filter(_has_length_dependent_rope, model.modules()):
                self.needs_last_position = True
                rotary.register_forward_pre_hook(partial(_add_last_position, self), with_kwargs=True)
                rotary.register_forward_hook(partial(_drop_last_position, self))
        if parallelism.computes_loss and not self.is_base_model:
            model.loss_function = self.make_global_loss(model.loss_function)
        if parallelism.sequence_parallel and not self.gather_after:
            model.base_model.register_forward_hook(self._gather_scored_states)
        entry_modules = self.entry_modules(model)
        for module in (entry_modules or [model]) if parallelism.tp_mesh is not None else ():
            module.register_forward_hook(self._gather_attentions)
        if parallelism.tp_mesh is not None and not (
            parallelism.computes_loss or self.is_base_model or len(entry_modules) > 1
        ):
            routers = _find_recorded_routers(model, entry_modules[0])
            is_full_sequence = all(map(self.runs_on_full_sequence, routers))
            if routers and (is_full_sequence or all(map(self.may_get_flat_tokens, routers))):
                self._returns_router_logits = True
                entry_modules[0].register_forward_hook(partial(self._gather_router_logits, is_full_sequence))

    def _gather_attentions(self, base: nn.Module, args: Any, output: Any) -> None:
        """Replace attention weights [batch, heads of this rank, seq, seq] in the output of `base` with those of all."""
        weights = getattr(output, "attentions", None)
        config: Any = base.config  # of `base`, such as an image tower, which has heads of its own
        num_heads = getattr(config.get_text_config(decoder=True), "num_attention_heads", None)
        if weights is None or not isinstance(num_heads, int):
            return
        output["attentions"] = tuple(
            self._gather_heads(t, num_heads) if isinstance(t, Tensor) and t.ndim == 4 and t.shape[1] < num_heads else t
            for t in weights
        )

    def _gather_heads(self, weights: Tensor, num_heads: int) -> Tensor:
        mesh: Any = self.parallelism.tp_mesh
        layout = next((layout for layout in self.uneven_heads.values() if layout.num_heads == num_heads), None)
        if layout is None:
            return gather(weights, 1, group=mesh, gather_size=num_heads)
        counts = [heads.num_heads for heads in layout.partition(mesh.size())]
        padded = F.pad(weights, (0, 0, 0, 0, 0, max(counts) - weights.shape[1]))
        shards = gather(padded, 1, group=mesh).split(max(counts), 1)
        return torch.cat([shard.narrow(1, 0, count) for shard, count in zip(shards, counts, strict=True)], 1)

    def _gather_router_logits(self, is_full_sequence: bool, base: nn.Module, args: Any, output: Any) -> None:
        """Replace the router logits in the output of `base`, if present, with the logits of all tokens, in order.

        Args:
            is_full_sequence: the logits cover all tokens already, because routers run on the full sequence.
        """
        state, logits = self.current_state(), getattr(output, "router_logits", None)
        if not state.is_tp_sharded or logits is None:
            return
        if not is_full_sequence:
            rows = (t.unflatten(0, (state.batch_size, -1)) for t in logits)
            mesh, length = self.parallelism.tp_mesh, state.local_len
            logits = tuple(gather(t, 1, group=mesh, gather_size=length).flatten(0, 1) for t in rows)
        output["router_logits"] = self._router_logits = logits
        self._head_outputs.record_replicated(logits)

    def _find_targets(self, arguments: dict[str, Any], tokens: Tensor, ignore_index: int) -> Tensor | None:
        self._scored_targets = None
        if not arguments.get(scored_tokens.SCORES_ARGUMENT):
            return super()._find_targets(arguments, tokens, ignore_index)
        if self.parallelism.shards_sequence:
            self._scored_targets = scored_tokens.take_targets(arguments, ignore_index)
        return None

    def _gather_scored_states(self, base: nn.Module, args: Any, output: Any) -> None:
        state = self.current_state()
        if self._scored_targets is not None and state.is_tp_sharded:
            mesh, length = self.parallelism.tp_mesh, state.local_len
            output.last_hidden_state = gather(output.last_hidden_state, 1, group=mesh, gather_size=length)

    def count_attention_layers(self, model: nn.Module) -> int:
        text_class, (state_layer, _) = (
            type(self.config.get_text_config()),
            STATE_LAYERS.get(self.config.model_type, ("", None)),
        )
        return sum(
            type(module).__name__.endswith("Attention")
            and type(module).__name__ != state_layer
            and type(getattr(module, "config", None)) is text_class  # other configs: layers for images or audio
            for module in model.modules()
        )

    def is_cached(self, arguments: dict[str, Any]) -> bool:
        return super().is_cached(arguments) or arguments.get("use_cache") is True

    def cache_types(self, arguments: dict[str, Any]) -> tuple[type, ...]:
        from transformers import Cache

        return (*super().cache_types(arguments), Cache)

    def check_arguments(self, arguments: dict[str, Any], seq_len: int, targets: Tensor | None) -> RowMasks:
        if not self.parallelism.shards_sequence:
            return RowMasks()
        if self.parallelism.cp_mesh is not None or arguments.get("cache") is None:  # generate_batch() sets its own
            self._check_attention()
        for name in PER_TOKEN_OUTPUTS:
            argument = arguments.get(name)
            is_supported = name == "output_router_logits" and self._returns_router_logits
            if not is_supported and (getattr(self.config, name, False) if argument is None else argument):
                raise ValueError(
                    f"{name}=True is not supported with sequence_parallel or cp_dim, because each rank has this output "
                    f"for its own tokens only. Pass {name}=False (with TRL, router_aux_loss_coef=0.0 turns router "
                    "logits off)."
                )
        makes_cache = self._disable_cache(arguments)
        if self.parallelism.cp_mesh is None:
            self._check_padding(arguments)
            check_documents(arguments, seq_len, makes_cache=makes_cache)
            if self.family.reads_length_from_mask and arguments.get("attention_mask") is None:
                _, tokens = self.find_tokens(arguments)
                arguments["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
            return RowMasks()
        mask = arguments.get("attention_mask")
        # Check padding first: positions of rows with padding on the left look like positions of packed documents.
        _, tokens = self.find_tokens(arguments)
        ignore_index = arguments.get("ignore_index", -100)
        has_padding = mask is not None and check_right_padding(mask, tuple(tokens.shape[:2]), targets, ignore_index)
        documents = self._take_documents(arguments, seq_len, makes_cache=makes_cache)
        arguments.pop("attention_mask", None)
        if has_padding and documents:
            raise ValueError(PADDED_DOCUMENTS_ERROR)
        return RowMasks(has_padding, documents)

    def _check_attention(self) -> None:
        """Raise ValueError if the attention was changed after `adapt`: it would see this rank's tokens only."""
        for config, replacement in self._attention_names:
            if config._attn_implementation != replacement:
                raise ValueError(
                    f"The model's attention was set to {config._attn_implementation!r} after parallelize, which needs "
                    f"{replacement!r} to attend over ranks. Set it before parallelize, or set it back to "
                    f"{replacement!r}."
                )
            if self.parallelism.cp_mesh is not None and is_original_attention_replaced(replacement):
                raise ValueError(
                    f"Another function was registered in ALL_ATTENTION_FUNCTIONS after parallelize for the attention "
                    f"that {replacement!r} wraps. Context parallel ranks do not call it; register it before "
                    "parallelize."
                )

    def _check_padding(self, arguments: dict[str, Any]) -> None:
        """Remove a mask without padding, and raise for others, if layers with a state would need a shard of it."""
        mask = arguments.get("attention_mask")
        if not self.non_attention_types or not isinstance(mask, Tensor) or mask.ndim != 2:
            return
        if not bool(mask.all()):
            raise ValueError(
                f"attention_mask has padding, which layers with {', '.join(self.non_attention_types)} do not support "
                "with sequence_parallel=True. Use rows of equal length, or pass sequence_parallel=False."
            )
        arguments["attention_mask"] = None

    def _take_documents(self, arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> tuple[int, ...]:
        documents = take_documents(arguments, seq_len, makes_cache=makes_cache)
        if not self.non_attention_types:
            return documents
        if len(_sorted_distinct(documents)) > 2:
            raise ValueError(
                "Rows hold packed documents (by position_ids or cu_seq_lens_q), which a cp_dim does not support for "
                f"layers with {', '.join(self.non_attention_types)}: their state would leak from one document to the "
                "next. Use rows of one document, padded on the right, or omit cp_dim."
            )
        return ()

    def _disable_cache(self, arguments: dict[str, Any]) -> bool:
        """Turn the KV cache off, which the config may enable by default. Return True if it was enabled."""
        use_cache = arguments.get("use_cache")
        arguments["use_cache"] = False
        return bool(getattr(self.config.get_text_config(), "use_cache", False) if use_cache is None else use_cache)

    def adapt_unsharded_arguments(self, arguments: dict[str, Any], seq_len: int) -> None:
        documents = self._take_documents(arguments, seq_len, makes_cache=self._disable_cache(arguments))
        if not documents:
            return
        mask, positions = arguments.pop("attention_mask", None), arguments.get("position_ids")
        if mask is not None and not bool(mask.all()):
            raise ValueError(PADDED_DOCUMENTS_ERROR)
        if positions is None or not bool((positions.diff(dim=-1) != 1).any()):
            # Without a mask and a cache, transformers separates documents by their positions: pass such positions.
            document_positions = [
                torch.arange(stop - start, device="cpu") for start, stop in itertools.pairwise(documents)
            ]
            tokens = next(arguments[name] for name in self.token_names if arguments.get(name) is not None)
            arguments["position_ids"] = torch.cat(document_positions).to(tokens.device).unsqueeze(0)

    def is_too_short(self, seq_len: int) -> bool:
        mesh = self.parallelism.tp_mesh
        needs_tokens = self.family.supports_eager_sequences or self.family.needs_tokens
        if mesh is not None and self.parallelism.sequence_parallel and needs_tokens:
            num_cp_ranks = 1 if self.parallelism.cp_mesh is None else self.parallelism.cp_mesh.size()
            # Shards of context parallel ranks have one of these two lengths.
            for num_tokens in (seq_len // num_cp_ranks, -(-seq_len // num_cp_ranks)):
                start, stop = shard_range(num_tokens, mesh.size(), mesh.size() - 1)
                if start == stop:  # without tokens, these models fail in a view [-1, 0, hidden]
                    return True
        return super().is_too_short(seq_len)

    def entry_modules(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if module is not model and is_transformers_model(module)]

    def default_positions(self, tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
        counter, mask = self._position_counter, arguments.get("attention_mask")
        if self.family.counts_positions_in_mask and isinstance(mask, Tensor) and mask.ndim == 2:
            return (mask.long().cumsum(1) * mask - 1).long()
        if counter is None:
            return super().default_positions(tokens, arguments).unsqueeze(0)
        argument_name = "input_ids" if tokens.ndim == 2 else "inputs_embeds"
        positions: Tensor = getattr(counter, f"create_position_ids_from_{argument_name}")(tokens, counter.padding_idx)
        return positions

    def open_cache(self, model: nn.Module, arguments: dict[str, Any], num_new_tokens: int) -> CachedPass | None:
        cache = arguments.get("past_key_values")
        if cache is None and arguments.get("use_cache") is not True:
            return None
        if is_sharded(cache):
            self._check_sharded_cache_call(model, arguments)
        elif not self._can_shard_cache(model, arguments):
            return None
        self._check_attention()
        assert self.parallelism.cp_mesh is not None  # checked by the caller
        return make_cached_pass(arguments, num_new_tokens, self.parallelism.cp_mesh, self.config)

    def _check_sharded_cache_call(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        """Raise ValueError for calls that attention over a sharded cache does not support."""
        if model.training:
            raise ValueError(
                "past_key_values is sharded over context parallel ranks, which does not support training. Call "
                "model.eval(), or omit past_key_values."
            )
        if self._returns_attentions(arguments):
            raise ValueError(
                "output_attentions=True is not supported with a cache that is sharded over context parallel ranks, "
                "because no rank has all attention weights. Omit it, or pass it also in the call that creates the "
                "cache: every rank then holds the full cache."
            )

    def _returns_attentions(self, arguments: dict[str, Any]) -> bool:
        output_attentions = arguments.get("output_attentions")
        return bool(
            getattr(self.config, "output_attentions", False) if output_attentions is None else output_attentions
        )

    def _can_shard_cache(self, model: nn.Module, arguments: dict[str, Any]) -> bool:
        """True if attention over a sharded cache computes the same as the model's attention.

        It has no gradient, and supports only causal masks and windows. Tensor arguments of unknown names may change
        the masks, so a call with such arguments does not use it.
        """
        text_config = self.config.get_text_config(decoder=True)
        layer_types = set(getattr(text_config, "layer_types", None) or ())
        known_names = {
            *self.token_names,
            *self.unsharded_names,
            self.position_name,
            self.label_name,
            "attention_mask",
            "cache_position",
        }
        return not (
            torch.is_grad_enabled()
            or model.training
            or self.config.is_encoder_decoder
            or layer_types - {"full_attention", "sliding_attention"}
            or self.non_attention_types  # a sharded cache does not hold the state of these layers
            or getattr(text_config, "num_kv_shared_layers", None)
            or not all(find_family(config).can_shard_cache for config in (text_config, self.config))
            # The cache holds latents, from which keys and values are computed.
            or getattr(text_config, "kv_lora_rank", None)
            or arguments.get("is_causal") is not None
            or self._returns_attentions(arguments)
            or any(isinstance(value, Tensor) and name not in known_names for name, value in arguments.items())
        )

    def extra_arguments(self, shard: ForwardShard | None) -> dict[str, Any]:
        if shard is None:
            return {}
        scored_arguments = (
            {}
            if self._scored_targets is None
            else {"shift_labels": scored_tokens.shard_targets(self._scored_targets, shard)}
        )
        if shard.cp is None:
            return scored_arguments
        # Without a mask, transformers would take gaps in a rank's positions for bounds of packed documents.
        # `_build_mask` ignores this mask.
        full_mask = torch.ones((shard.batch_size, shard.local_len), dtype=torch.bool, device=shard.cp.mesh.device_type)
        return {"attention_mask": full_mask, **scored_arguments}

    def unshard_output(self, output: Any, shard: ForwardShard) -> Any:
        if not self.parallelism.shards_sequence:
            return output
        if self._scored_targets is not None:
            gather_full = partial(self.gather_sequence, shard=shard)
            return scored_tokens.gather_scores(output, shard, gather_full, self._scored_targets)
        key: str | int = "last_hidden_state" if self.is_base_model else "logits"
        outputs = dict(enumerate(output) if isinstance(output, tuple) else dict(output).items())
        if isinstance(output, tuple):  # losses, which are scalars, come first
            key = next((n for n, value in enumerate(output) if isinstance(value, Tensor) and value.ndim), 0)
        for name, value in outputs.items():
            if name == key:
                outputs[name] = self._main_output(value, shard)
            elif self.is_base_model and isinstance(value, Tensor):
                raise ValueError(
                    f"The model returns a tensor {name!r} beside {key!r}, computed from this rank's shard of the "
                    "sequence. Such outputs are not supported with cp_dim or sequence_parallel. Turn the output off "
                    "(a pooler with add_pooling_layer=False), or omit cp_dim and sequence_parallel."
                )
            elif value is not self._router_logits:  # the stored router logits cover all tokens already
                outputs[name] = map_tensors(lambda t: self.gather_tokens(t, shard), value)
        self._router_logits = None  # frees their autograd graph
        if isinstance(output, tuple):
            return tuple(outputs.values())
        for name, value in outputs.items():
            output[name] = value
        return output

    def _main_output(self, t: Tensor, shard: ForwardShard) -> Tensor:
        """Gather the main output: the hidden states of a base model, or the logits of any other model."""
        if not self.is_base_model:
            t = self.gather_tokens(t, shard)
        else:
            t = self.gather_sequence(
                t, shard, is_tp_sharded=self.parallelism.sequence_parallel and not self.gather_after
            )
        keep = shard.logits_to_keep
        if isinstance(keep, Tensor) or keep != 0:
            t = t[:, slice(-keep, None) if isinstance(keep, int) else keep]
        return t


def _find_recorded_routers(model: nn.Module, base: Any) -> list[str]:
    """Return the names of the modules whose outputs transformers records as router logits; [] if they are unknown."""
    recorded_outputs = base.can_record_outputs.get("router_logits", ())
    classes: list[Any] = [
        getattr(entry, "target_class", entry)
        for entry in (recorded_outputs if isinstance(recorded_outputs, list | tuple) else [recorded_outputs])
    ]
    if not all(isinstance(router_class, type) for router_class in classes):
        return []
    return [name for name, module in model.named_modules() if isinstance(module, tuple(classes))]


def _has_length_dependent_rope(module: nn.Module) -> bool:
    """True if `module` is a rotary embedding whose frequencies depend on the greatest position it receives."""
    rope_types = getattr(module, "rope_type", None)
    rope_types = rope_types.values() if isinstance(rope_types, dict) else [rope_types]
    return any(
        isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope") for rope_type in rope_types
    )


def _add_last_position(
    sequence: SequenceSharding, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Append the greatest position of the full sequence to `position_ids`, so that ranks compute equal frequencies."""
    cp = sequence.current_state().cp
    last_position = None if cp is None else cp.last_position
    if last_position is None:
        return None

    def append_last(positions: Tensor) -> Tensor:
        return torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last_position)], -1)

    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": append_last(kwargs["position_ids"])}
    x, positions, *rest = args
    return (x, append_last(positions), *rest), kwargs


def _drop_last_position(sequence: SequenceSharding, rotary: nn.Module, args: Any, output: Any) -> Any:
    """Drop the row of the appended position from outputs [..., seq, width]."""
    cp = sequence.current_state().cp
    return output if cp is None or cp.last_position is None else map_tensors(lambda t: t[..., :-1, :], output)


def _extend_past_length(sequence: SequenceSharding, positions: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Increase the past length that XGLM receives, so that its table of positions covers the tokens of all ranks."""
    cp, (embeddings, *_) = sequence.current_state().cp, args
    return args if cp is None else (embeddings, cp.seq_len - embeddings.shape[1])


def _copy_config(model: PreTrainedModel) -> None:
    """Replace the config of `model` by a copy.

    transformers uses one object in all models built from it, and other models must keep their attention.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if id(config) in copies:
            module.config = copies[id(config)]


def check_right_padding(mask: Any, tokens_shape: tuple[int, ...], targets: Tensor | None, ignore_index: int) -> bool:
    """Return True if the mask has padding on the right. Raise if causal attention cannot ignore the mask.

    Causal attention does not see padding on the right of a token. Only outputs at the padding itself change without
    the mask, so targets there must be `ignore_index`.

    Args:
        tokens_shape: (batch, seq) of the masked tokens.

    Raises:
        ValueError: the mask has another shape or padding elsewhere, or targets at padding are not `ignore_index`.
    """
    description = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in (tokens_shape, (1, *tokens_shape[1:])):
        raise ValueError(
            f"attention_mask is {description}; with a cp_dim it must be [batch, seq], here {tokens_shape}, with "
            "padding only on the right."
        )
    mask = mask.expand(tokens_shape)
    is_token = mask.bool()
    if bool(is_token.all()):
        return False
    if bool((is_token[:, 1:] & ~is_token[:, :-1]).any()):
        raise ValueError(
            "attention_mask has padding on the left of tokens, which is not supported with a cp_dim. Pad on the right "
            "(tokenizer.padding_side='right'), or, to generate, pass use_cache=True."
        )
    if targets is not None and bool((targets[~is_token] != ignore_index).any()):
        raise ValueError(
            f"labels at padding positions must be {ignore_index}, because padding is not masked with a cp_dim. Set "
            f"them to {ignore_index}."
        )
    return True


# ---- packed documents -----------------------------------------------------------------------------------------------
#
# Without a mask and a cache, transformers treats positions [1 or batch, seq] that do not increase by one as packed
# documents, and tokens attend only within their document. Packing ("padding-free") data collators produce such
# positions, and may also pass DOCUMENT_BOUND_NAMES, which transformers' flash attention reads. Over context parallel
# ranks, tokens always attend only within their document. This includes the few models (gpt-oss) whose masks for sdpa
# and eager ignore positions, so that only flash attention separates documents.

DOCUMENT_BOUND_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
DOCUMENT_INDEX_NAME = "seq_idx"  # [batch, seq], document index of each token, for kernels of state spaces


def take_documents(arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> tuple[int, ...]:
    """Return the bounds (0, ..., seq_len) of the documents in each row, or () for one document.

    DOCUMENT_BOUND_NAMES and DOCUMENT_INDEX_NAME are removed from `arguments`.

    Args:
        makes_cache: True if transformers would fill a KV cache, requested or by default.

    Raises:
        ValueError: rows hold documents of different lengths; two descriptions disagree; only `seq_idx` describes
            documents; or only positions do, in a call in which transformers would not read them as documents.
    """
    bounds = _documents_from_bounds({name: arguments.pop(name, None) for name in DOCUMENT_BOUND_NAMES}, seq_len)
    document_indices = arguments.pop(DOCUMENT_INDEX_NAME, None)
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    starts = () if positions is None or positions.shape[-1] != seq_len else _documents_from_positions(positions, mask)
    if starts and not bounds:
        _refuse_ambiguous_documents(mask, makes_cache)
    if bounds and starts and _sorted_distinct(bounds) != _sorted_distinct((*starts, seq_len)):
        raise ValueError(
            f"cu_seq_lens_q has documents that begin at {_format_bounds(bounds[:-1])}, but position_ids start again at "
            f"{_format_bounds(starts)}. Pass bounds and positions of the same documents."
        )
    if document_indices is not None and not bounds and not starts and bool((document_indices.diff(dim=-1) != 0).any()):
        raise ValueError(
            f"{DOCUMENT_INDEX_NAME} has several documents in a row, but position_ids and cu_seq_lens_q do not, and a "
            "cp_dim needs one of these. Pass position_ids that start again at each document."
        )
    return bounds or ((*starts, seq_len) if starts else ())


def check_documents(arguments: dict[str, Any], seq_len: int, *, makes_cache: bool) -> None:
    """Check packed documents of a forward pass without context parallelism, in which transformers separates documents.

    The KV cache is turned off here. With a cache, transformers may let documents attend to each other; without one, it
    separates them.

    Raises:
        ValueError: without sharding, the call might therefore compute something else.
    """
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if (
        not makes_cache
        or positions is None
        or positions.shape[-1] != seq_len
        or arguments.get(DOCUMENT_BOUND_NAMES[0]) is not None
    ):
        return
    if positions.ndim == 2 and mask is None and bool((positions.diff(dim=-1) != 1).any()):
        _refuse_ambiguous_documents(mask, makes_cache)


def _refuse_ambiguous_documents(mask: Tensor | None, makes_cache: bool) -> None:
    if makes_cache or mask is not None:
        # In this case flash attention separates documents, but the masks of sdpa and eager do not.
        raise ValueError(
            "position_ids start again inside rows, like positions of packed documents. With an attention_mask, or with "
            "use_cache=True (the default), it depends on transformers' attention whether such documents attend to each "
            "other. Pass use_cache=False and omit attention_mask to keep them separate, or pass their bounds as "
            "cu_seq_lens_q."
        )


def _documents_from_bounds(arguments: dict[str, Any], seq_len: int) -> tuple[int, ...]:
    queries, keys = arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"]
    if queries is None:
        return ()
    queries = torch.as_tensor(queries, device="cpu")
    if keys is not None and torch.as_tensor(keys, device="cpu").tolist() != queries.tolist():
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal: only self-attention is supported.")
    return read_bounds("cu_seq_lens_q", queries, seq_len)


def _documents_from_positions(positions: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """Return the starts (0, ...) of the documents, where `positions` [..., seq] start again; () for one document."""
    breaks = positions.diff(dim=-1) != 1
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == breaks.shape[:-1] + positions.shape[-1:]:
        breaks = breaks & mask[:, 1:].bool()  # positions of padding may have any value
    if not bool(breaks.any()):
        return ()
    if positions.ndim > 2:
        raise ValueError(
            f"position_ids {tuple(positions.shape)} do not increase by one, which with a cp_dim is supported only for "
            "packed documents, with positions [batch, seq]. Omit cp_dim."
        )
    rows = breaks.view(-1, breaks.shape[-1])
    if not bool((rows == rows[0]).all()):
        raise ValueError(
            "position_ids start again at different positions in different rows; with a cp_dim, all rows must hold "
            "packed documents of the same lengths. Pack all documents into one long row."
        )
    return (0, *(rows[0].nonzero().flatten() + 1).tolist())


def _sorted_distinct(bounds: tuple[int, ...]) -> list[int]:
    return sorted(set(bounds))


def _format_bounds(bounds: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, bounds[:8]))
    return f"({shown}, ...)" if len(bounds) > 8 else f"({shown})"
