"""Count a transformers model on the meta device, where parameters have sizes but take no memory.

| `ModelShape` part   | counted from                                                                                 |
|---------------------|----------------------------------------------------------------------------------------------|
| parameters          | `named_modules`, each parameter once; expert parameters separately                           |
| operations          | weights of matmuls, once per use; expert weights times the share of experts per token        |
| heads, windows      | modules whose code contains a softmax over scores, and their features                        |
| sharding over tp    | the plan that `parallelize` would use                                                        |
| unsupported configs | the checks of `parallelize`, on one layer of each kind                                       |
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from fused_tp.core.errors import join_words
from fused_tp.nn.linear import features_of, is_conv1d
from fused_tp.parallelizing.experts import takes_routing
from fused_tp.parallelizing.hf.hf_model import ATTENTION_REGISTRY, check_transformers_model
from fused_tp.parallelizing.layers import check_layers
from fused_tp.parallelizing.sequence_sharding import Parallelism
from fused_tp.parallelizing.shard_plan import (
    HEAD_PROJECTIONS,
    ShardingPlan,
    check_experts,
    check_experts_not_distributed,
    choose_intermediate_styles,
    config_value,
    head_counts,
    is_kv_count,
    plan_experts,
    repeat_key_value_heads,
    resolve_plan,
    spec_of,
)
from fused_tp.parallelizing.uneven_heads import share_uneven_heads
from fused_tp.parallelizing.whole_blocks import find_blocks
from fused_tp.pipelining.stages import find_container
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.model_shape import Attention, Block, Layer, ModelShape, Weights

# Names in the code of attention classes that do not call transformers' attention interface.
_SOFTMAX_NAMES = {"softmax", "Softmax", "scaled_dot_product_attention"}
_EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN_NAMES = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_top_k", "moe_topk", "moe_k", "topk"),
    *("top_k_experts", "num_selected_experts"),
)
# Substrings of names of expert weights that map back to the hidden state.
_DOWN_PROJECTION_SUBSTRINGS = ("down", "output", "out_proj", "w2")


def count_config(config: Any) -> ModelShape:
    """Count the causal language model that transformers creates from `config`.

    Raises:
        ValueError: transformers cannot create the model; the message says why.
    """
    try:
        model = make_meta_model(config)
    except Exception as error:  # any error: an invalid config, a missing library
        raise ValueError(
            f"transformers cannot create a causal language model from the config of {_model_name(config)}: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return count_model(model)


@dataclass(frozen=True)
class ShardedShare:
    """Shares of the elements in a model's layers that are in sharded parameters, from 0 to 1.

    Attributes:
        total: share of all elements, experts included.
        outside_experts: share of the elements outside of routed experts. Each token uses all of these, but few experts.
    """

    total: float
    outside_experts: float


def count_sharded_share(config: Any, num_ranks: int) -> ShardedShare:
    """Count the elements of the layers of a config's model that plan="auto" shards over tensor parallel ranks.

    An indexer that selects the tokens to attend to counts like any other part of its layer.

    Raises:
        ValueError: `parallelize` would not accept the model on `num_ranks` ranks.
    """
    model: Any = make_meta_model(config)
    model_layers = _LayerBlocks(model)
    drop_repeated_layers(model, model_layers)
    plan = repeat_key_value_heads(model, resolve_plan(model, "auto"), num_ranks)
    plan = choose_intermediate_styles(model, share_uneven_heads(model, plan, num_ranks))
    check_layers(model, plan, num_ranks)
    counter = _LayerCounter(config_value(model.config, "hidden_size") or 1, model.config.get_text_config(), plan)
    dense, experts = Weights(), Weights()
    for kind_index in model_layers.kind_indices:
        parameters = _first_occurrences(model_layers.layer_kinds[kind_index].parameters)
        dense += counter.sum_weights(param for param in parameters if not param.is_expert)
        experts += counter.sum_weights(param for param in parameters if param.is_expert)
    total = dense + experts
    return ShardedShare(total.sharded_count / total.count, dense.sharded_count / dense.count)


def _model_name(config: Any) -> str:
    return getattr(config, "name_or_path", "") or config.model_type


def make_meta_model(config: Any) -> nn.Module:
    """Create the causal language model of a transformers config on the meta device, without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return model


def count_model(model: Any) -> ModelShape:
    """Count a model created by `make_meta_model`. Removes all but one layer of each kind from the model."""
    name, text_config = _model_name(model.config), model.config.get_text_config()
    model_layers = _LayerBlocks(model)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    hidden = config_value(text_config, "hidden_size") or embedding.weight.shape[-1]
    drop_repeated_layers(model, model_layers)
    plan_check = PlanCheck(model, model_layers, name)
    counter = _LayerCounter(hidden, text_config, plan_check.plan)
    layers_by_kind = [counter.count_layer(kind) for kind in model_layers.layer_kinds]
    is_tied = output is not None and output.weight is embedding.weight
    output_parameters = (
        [] if output is None else [param for param in model_layers.outside_parameters if param.module is output]
    )
    embedding_parameters = [param for param in model_layers.outside_parameters if is_tied or param.module is not output]
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=config_value(text_config, "vocab_size") or (0 if output is None else features_of(output)[1]),
        stack=tuple(layers_by_kind[kind_index] for kind_index in model_layers.kind_indices),
        embedding=counter.sum_weights(_first_occurrences(embedding_parameters)),
        output=counter.sum_weights(output_parameters),
        is_tied=is_tied,
        notes=(
            *model_layers.notes,
            *counter.notes(model_layers, layers_by_kind),
            *_outside_notes(_first_occurrences(embedding_parameters), output),
        ),
        check=plan_check.check,
    )


# -- layers and parameters of a model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModuleParameter:
    """A parameter and a module that holds it.

    Attributes:
        path: path of the module in the model.
        path_in_layer: path of the module in its layer; equal to `path` outside the layers.
        is_first: True if no earlier module holds the same parameter.
    """

    path: str
    path_in_layer: str
    module: nn.Module
    key: str
    parameter: nn.Parameter
    is_first: bool

    @property
    def is_expert(self) -> bool:
        """True if the parameter belongs to routed experts."""
        if "experts" in self.path.split("."):
            return True
        num_experts = _first_positive_int(_EXPERT_COUNT_NAMES, self.module)
        return self.parameter.ndim == 3 and not isinstance(self.module, _ConvNd) and num_experts == len(self.parameter)

    @property
    def is_matmul_weight(self) -> bool:
        """True if the parameter is the weight of a matmul or of a convolution."""
        return self.parameter.ndim > 1 and not isinstance(self.module, nn.Embedding) and "bias" not in self.key


class _LayerBlocks:
    """Layers of a model with their parameters, and the parameters outside the layers.

    Attributes:
        container: name of the nn.ModuleList of layers; "" if none is found, and the model then counts as one layer.
        layer_kinds: distinct layers, each represented by its first layer.
        kind_indices: index into `layer_kinds` for each layer.
        outside_parameters: parameters outside the layers.
        unsupported_reason: message of the error that features raise if they need a list of layers; "" if there is one.
        modules: the layers.
        notes: messages about the choice of layers.
    """

    def __init__(self, model: Any) -> None:
        self.container, self.unsupported_reason = "", ""
        self.notes: list[str] = []
        self._find_container(model)
        container_prefix = f"{self.container}."
        layer_parameters: dict[int, list[_ModuleParameter]] = {}
        self.outside_parameters: list[_ModuleParameter] = []
        seen_ids: set[int] = set()
        output = model.get_output_embeddings()
        for path, module in model.named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                layer_index, path_in_layer = -1, path
                if self.container and path.startswith(container_prefix):
                    index, _, path_in_layer = path.removeprefix(container_prefix).partition(".")
                    layer_index = int(index)
                elif not self.container and not isinstance(module, nn.Embedding) and module is not output:
                    layer_index = 0
                module_parameter = _ModuleParameter(
                    path, path_in_layer, module, key, parameter, id(parameter) not in seen_ids
                )
                seen_ids.add(id(parameter))
                (self.outside_parameters if layer_index < 0 else layer_parameters.setdefault(layer_index, [])).append(
                    module_parameter
                )
        self.modules = list(model.get_submodule(self.container).children()) if self.container else [model]
        layer_types = config_value(model.config.get_text_config(), "layer_types") or ()
        kind_index_of_signature: dict[object, int] = {}
        self.layer_kinds: list[_RepresentativeLayer] = []
        self.kind_indices = []
        for layer_index, module in enumerate(self.modules):
            layer_type = layer_types[layer_index] if self.container and layer_index < len(layer_types) else ""
            parameters = layer_parameters.get(layer_index, [])
            signature = (
                layer_type,
                type(module),
                tuple(
                    (param.path_in_layer, type(param.module), param.key, param.parameter.shape, param.is_first)
                    for param in parameters
                ),
                tuple(getattr(submodule, "sliding_window", None) for submodule in module.modules()),
            )
            if signature not in kind_index_of_signature:
                kind_index_of_signature[signature] = len(self.layer_kinds)
                self.layer_kinds.append(_RepresentativeLayer(layer_index, module, layer_type, parameters))
            self.kind_indices.append(kind_index_of_signature[signature])

    def _find_container(self, model: Any) -> None:
        try:
            self.container = find_container(model, None)
            return
        except ValueError as error:
            self.unsupported_reason = str(error)
        text_config = model.config.get_text_config()
        for name, module in model.named_modules():
            if name and getattr(module, "config", None) is text_config and text_config is not model.config:
                try:
                    self.container = f"{name}.{find_container(module, None)}"
                except ValueError:
                    continue
                self.unsupported_reason = ""
                self.notes.append(
                    f"The layers of {self.container} are counted; pass layers={self.container!r} to build."
                )
                return
        self.notes.append(f"The model is counted as a single layer that runs once: {self.unsupported_reason}")


@dataclass(frozen=True)
class _RepresentativeLayer:
    """First of a set of equal layers, with its index, module and parameters."""

    layer_index: int
    module: nn.Module
    layer_type: str
    parameters: list[_ModuleParameter]


def drop_repeated_layers(model: nn.Module, model_layers: _LayerBlocks) -> None:
    """Remove all but one layer of each kind from `model`, so that checks of deep models are fast."""
    if model_layers.container:
        layers: Any = model.get_submodule(model_layers.container)
        layers._modules.clear()
        for kind_index, kind in enumerate(model_layers.layer_kinds):
            layers.append(kind.module)
            prefix = f"{model_layers.container}.{kind_index}"
            kind.parameters[:] = [
                replace(param, path=f"{prefix}.{param.path_in_layer}" if param.path_in_layer else prefix)
                for param in kind.parameters
            ]


def _first_occurrences(module_parameters: Iterable[_ModuleParameter]) -> list[_ModuleParameter]:
    return [param for param in module_parameters if param.is_first]


# -- counts -----------------------------------------------------------------------------------------------------------


class _LayerCounter:
    """Counts the weights, matmuls and attention of layers, as `plan` shards them."""

    def __init__(self, hidden: int, text_config: Any, plan: ShardingPlan) -> None:
        self.hidden, self.text_config, self.plan = hidden, text_config, plan

    def sum_weights(self, module_parameters: Iterable[_ModuleParameter]) -> Weights:
        return sum(
            (Weights(param.parameter.numel(), self.sharded_numel(param)) for param in module_parameters), Weights()
        )

    def sharded_numel(self, param: _ModuleParameter) -> int:
        """Return the number of elements of a parameter that are sharded over tensor parallel ranks."""
        name = f"{param.path}.{param.key}" if param.path else param.key
        size = param.parameter.numel()
        if name in self.plan.parameters:
            return size
        spec = spec_of(self.plan.modules.get(param.path))
        if spec.shard_dim is None or spec.repeats_heads or (spec.shard_dim == 1 and param.parameter.ndim == 1):
            return 0
        if spec.shares_keys:
            in_features, out_features = features_of(param.module)
            return size * in_features // out_features
        return size

    def count_layer(self, kind: _RepresentativeLayer) -> Layer:
        dense_parameters = [param for param in kind.parameters if not param.is_expert]
        expert_parameters = [param for param in kind.parameters if param.is_expert]
        num_experts, experts_per_token = self._expert_counts(kind, expert_parameters) if expert_parameters else (0, 0)
        expert_share = experts_per_token / num_experts if num_experts else 1.0
        return Layer(
            name=type(kind.module).__name__,
            weights=self.sum_weights(_first_occurrences(dense_parameters)),
            expert_weights=self.sum_weights(_first_occurrences(expert_parameters)),
            experts=num_experts,
            experts_per_token=experts_per_token,
            blocks=tuple(self._yield_blocks(kind, expert_share)),
            attention=tuple(self._yield_attention(kind)),
            tensor_count=len(_first_occurrences(kind.parameters)),
        )

    def _expert_counts(self, kind: _RepresentativeLayer, expert_parameters: list[_ModuleParameter]) -> tuple[int, int]:
        """Return the number of experts of a layer and the number per token; all experts if the config has no number."""
        expert_names = {
            match[0] for param in expert_parameters if (match := re.search(r"experts\.\d+(?=\.|$)", param.path))
        }
        packed_counts = (len(param.parameter) for param in expert_parameters if param.parameter.ndim == 3)
        modules = [module for module in kind.module.modules() if type(module).__name__ != "ModuleList"]
        num_experts = (
            len(expert_names)
            or next(packed_counts, 0)
            or _first_positive_int(_EXPERT_COUNT_NAMES, *modules, self.text_config)
        )
        return num_experts, min(
            num_experts, _first_positive_int(_EXPERTS_PER_TOKEN_NAMES, *modules, self.text_config, default=num_experts)
        )

    def _yield_blocks(self, kind: _RepresentativeLayer, expert_share: float) -> Iterator[Block]:
        """Yield the blocks of a layer: its matmuls, grouped by the submodule of the layer that contains them."""
        groups: dict[str, list[_ModuleParameter]] = {}
        for param in kind.parameters:
            if param.is_matmul_weight:
                groups.setdefault(_submodule_of_layer(param.path_in_layer), []).append(param)
        pending_parameters: list[_ModuleParameter] = []
        for group_index, group in enumerate(groups.values(), 1):
            block = self._make_block([*pending_parameters, *group], expert_share)
            # Column-parallel matmuls without a row-parallel one form a block together with the next group.
            pending_parameters = (
                [*pending_parameters, *group]
                if block.column_features and not block.row_features and group_index < len(groups)
                else []
            )
            if not pending_parameters:
                yield block

    def _make_block(self, group: list[_ModuleParameter], expert_share: float) -> Block:
        column_features = row_features = replicated_features = saved_features = saved_replicated_features = 0.0
        for param in group:
            active_share = expert_share if param.is_expert else 1.0
            sharded_numel = self.sharded_numel(param)
            sharded_share = sharded_numel / param.parameter.numel()
            replicated_features += active_share * (param.parameter.numel() - sharded_numel)
            if self._is_row_parallel(param):
                row_features += active_share * sharded_numel
            else:
                column_features += active_share * sharded_numel
            saved_features += active_share * sharded_share * self._saved_features(param)
            saved_replicated_features += active_share * (1 - sharded_share) * self._saved_features(param)
        return Block(
            column_features=column_features / self.hidden,
            row_features=row_features / self.hidden,
            replicated_features=replicated_features / self.hidden,
            saved_features=saved_features,
            saved_replicated_features=saved_replicated_features,
            has_experts=any(param.is_expert for param in group),
        )

    def _is_row_parallel(self, param: _ModuleParameter) -> bool:
        """True if the weight, if sharded, is row-parallel: it maps back to the hidden state."""
        if param.is_expert:
            return any(substring in f"{param.path_in_layer}.{param.key}" for substring in _DOWN_PROJECTION_SUBSTRINGS)
        return spec_of(self.plan.modules.get(param.path)).shard_dim == 1

    def _saved_features(self, param: _ModuleParameter) -> int:
        """Return the number of features of a matmul that backward needs, excluding the hidden state."""
        *batch_sizes, out_features, in_features = param.parameter.shape
        if isinstance(param.module, _ConvNd):
            return int(param.parameter.shape[0])
        num_matmuls = 1
        for size in batch_sizes:
            num_matmuls *= size
        return num_matmuls * int(in_features if out_features == self.hidden else out_features)

    def _yield_attention(self, kind: _RepresentativeLayer) -> Iterator[Attention]:
        for path, module in kind.module.named_modules():
            if _has_attention(module):
                parameters = [
                    param
                    for param in kind.parameters
                    if f"{param.path_in_layer}.".startswith(f"{path}." if path else "")
                ]
                yield self._make_attention(module, parameters, self._find_window(module, kind.layer_type))

    def _make_attention(self, module: nn.Module, parameters: list[_ModuleParameter], window: int | None) -> Attention:
        linears = {
            param.path_in_layer.removesuffix(".linear").rpartition(".")[2]: param.module
            for param in parameters
            if param.is_matmul_weight
        }
        linears = {
            leaf: linear for leaf, linear in linears.items() if isinstance(linear, nn.Linear) or is_conv1d(linear)
        }
        output_in_features = [
            features_of(linear)[0]
            for leaf, linear in linears.items()
            if features_of(linear)[1] == self.hidden and leaf not in HEAD_PROJECTIONS
        ]
        query_features = [
            features_of(linear)[1] for leaf, linear in linears.items() if leaf in ("q_proj", "query", "q_lin", "q")
        ]
        head_features = _first_positive_int(("v_head_dim", "head_dim", "attention_head_size", "head_size"), module)
        module_counts, config_counts = (
            head_counts(module),
            head_counts(getattr(module, "config", None), self.text_config),
        )
        num_heads = next((n for key, n in (module_counts or config_counts).items() if not is_kv_count(key)), 0)
        # Value features of all heads.
        value_features = next(iter([*output_in_features, *query_features]), head_features * num_heads or self.hidden)
        if (
            head_features
            and value_features % head_features == 0
            and not any(not is_kv_count(key) for key in module_counts)
        ):
            num_heads = value_features // head_features
        value_head_dim = value_features / max(num_heads, 1)
        score_head_dim = _first_positive_int(("qk_head_dim", "head_dim"), module) or value_head_dim
        key_projection = linears.get("k_proj") or linears.get("key")
        is_latent = _first_positive_int(("qk_head_dim", "kv_lora_rank"), module) > 0
        if is_latent:
            num_kv_heads = num_heads
        elif key_projection is not None and features_of(key_projection)[1] % score_head_dim == 0:
            num_kv_heads = int(features_of(key_projection)[1] // score_head_dim)
        else:
            num_kv_heads = next(
                (n for key, n in (module_counts | config_counts).items() if is_kv_count(key)), num_heads
            )
        return Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=(score_head_dim + value_head_dim) / 2,
            window=window,
            is_sharded=any(self.sharded_numel(param) for param in parameters),
        )

    def _find_window(self, module: nn.Module, layer_type: str) -> int | None:
        """Return the attention window of a layer in tokens; None for full causal attention."""
        window_names = {"sliding_attention": ("sliding_window",), "chunked_attention": ("attention_chunk_size",)}
        default_names = () if config_value(self.text_config, "layer_types") else ("sliding_window",)
        config_window = _first_positive_int(
            window_names.get(layer_type, default_names), getattr(module, "config", None), self.text_config
        )
        return _first_positive_int(("sliding_window",), module) or config_window or None

    def notes(self, model_layers: _LayerBlocks, layers_by_kind: list[Layer]) -> Iterator[str]:
        """Yield messages about operations that the cost model omits."""
        counts = Counter(model_layers.kind_indices)
        mixer_counts: Counter[str] = Counter()
        for kind_index, (kind, layer) in enumerate(zip(model_layers.layer_kinds, layers_by_kind, strict=True)):
            mixer_counts.update(dict.fromkeys(_mixer_names(kind.module), counts[kind_index]))
            if layer.experts and layer.experts_per_token == layer.experts:
                yield f"Each token is assumed to use all {layer.experts} experts of {layer.name}."
        if not mixer_counts and not any(layer.attention for layer in layers_by_kind):
            mixer_counts.update(dict.fromkeys((layer.name for layer in layers_by_kind), len(model_layers.kind_indices)))
        if mixer_counts:
            mixer_list = join_words(
                f"{name} (in {count} of {len(model_layers.kind_indices)} layers)"
                for name, count in mixer_counts.items()
            )
            yield f"Only matmuls with weights are counted in {mixer_list}, not other operations on tokens or features."
        if selected_tokens := _first_positive_int(("index_topk",), self.text_config):
            yield f"Attention is counted over all previous tokens, not over index_topk={selected_tokens} selected ones."


def _mixer_names(layer: nn.Module) -> Iterator[str]:
    """Yield names of classes in a layer with operations beyond matmuls: convolutions, state space models, ..."""
    for path, module in layer.named_modules():
        name = type(module).__name__
        if isinstance(module, _ConvNd):
            yield name
        elif not path or _has_attention(module) or takes_routing(module):
            continue
        elif "attention" in name.lower():  # report the innermost attention class, not its wrappers
            if not any(
                "attention" in type(submodule).__name__.lower()
                for submodule in module.modules()
                if submodule is not module
            ):
                yield name
        elif "expert" not in name.lower() and "activation" not in name.lower():
            keys = module._parameters.keys() - {"weight"}
            if "dt_bias" in keys or not all("bias" in key for key in keys):
                yield name


def _submodule_of_layer(path_in_layer: str) -> str:
    first_name, dot, _ = path_in_layer.partition(".")
    return first_name if dot else ""


def _first_positive_int(names: Iterable[str], *sources: object, default: int = 0) -> int:
    """Return the first positive integer among the attributes `names` of `sources`; `default` if there is none."""
    values = (config_value(source, name) for source in sources for name in names)
    return next((n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0), default)


def _has_attention(module: nn.Module) -> bool:
    """True if the code of the module's class contains a softmax over scores."""
    module_class: Any = type(module)
    return _has_softmax(module_class)


@cache
def _has_softmax(module_class: Any) -> bool:
    has_attention_name = any(substring in module_class.__name__.lower() for substring in ("attention", "attn"))
    for base in module_class.__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            functions = (inspect.unwrap(value) for value in vars(base).values() if inspect.isfunction(value))
            names_used = {name for function in functions for name in _names_used(function.__code__)}
            if ATTENTION_REGISTRY in names_used or (has_attention_name and not _SOFTMAX_NAMES.isdisjoint(names_used)):
                return True
    return False


def _names_used(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals that `code` uses, including nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_used(constant)


def _outside_notes(parameters: list[_ModuleParameter], output: nn.Module | None) -> Iterator[str]:
    numel_of_module: Counter[str] = Counter()
    for param in parameters:
        if param.is_matmul_weight and param.module is not output:
            numel_of_module[".".join(param.path.split(".")[:2])] += param.parameter.numel()
    if numel_of_module:
        names = join_words(f"{name} ({numel / 1e6:,.1f} million)" for name, numel in numel_of_module.items())
        yield f"Weights outside the layers: {names}. Their memory is counted, their operations are not."


# -- unsupported configs ----------------------------------------------------------------------------------------------


class PlanCheck:
    """Checks of `parallelize` and `build` that need no ranks, on a model on the meta device."""

    def __init__(self, model: Any, model_layers: _LayerBlocks, name: str) -> None:
        self.model, self.model_layers, self.name = model, model_layers, name
        try:
            self.plan = choose_intermediate_styles(model, resolve_plan(model, "auto"))
        except (TypeError, ValueError):
            self.plan = ShardingPlan()  # `check` raises with the reason
        self._find_cached_unsupported_reason: Callable[..., str] = cache(self._find_unsupported_reason)

    def check(self, config: ParallelConfig) -> None:
        """Raise ValueError with the reason if `build` would reject the model in `config`."""
        needs_layers = config.pp > 1 or config.recompute == "full" or config.is_sharded
        unsupported_reason = self.model_layers.unsupported_reason if needs_layers else ""
        unsupported_reason = unsupported_reason or self._find_cached_unsupported_reason(
            config.tp, config.cp > 1, config.ep, config.sequence_parallel, config.loss_parallel
        )
        if unsupported_reason:
            raise ValueError(f"{self.name} cannot run at {config.shown()}: {unsupported_reason}")

    def _find_unsupported_reason(
        self, tp: int, has_cp: bool, ep: int, sequence_parallel: bool, loss_parallel: bool
    ) -> str:
        model = self.model
        mesh: Any = object()  # placeholder: these checks only compare the mesh with None
        parallelism = Parallelism(
            mesh if tp > 1 else None, mesh if has_cp else None, sequence_parallel, loss_parallel, True
        )
        try:
            plan = resolve_plan(model, "auto") if tp > 1 else ShardingPlan()
            if ep > 1:
                plan_experts(model, plan, "auto", ep, are_experts_unsharded=tp == 1)
            else:
                check_experts_not_distributed(plan, None)
            if tp > 1:
                plan = repeat_key_value_heads(model, plan, tp)
                plan = share_uneven_heads(model, plan, tp)
                plan = choose_intermediate_styles(model, plan, shards_logits=loss_parallel)
                check_experts(model, plan)
            check_layers(model, plan, tp)
            check_transformers_model(model, plan.modules, parallelism)
            if sequence_parallel:
                find_blocks(model, plan, exchanges_expert_rows=ep > 1)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""
