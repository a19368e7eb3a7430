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

from fused_tp.core.errors import listed
from fused_tp.nn.linear import features_of, is_conv1d
from fused_tp.parallelizing.experts import takes_routing
from fused_tp.parallelizing.hf.hf_model import ATTENTION_REGISTRY, check_transformers_model
from fused_tp.parallelizing.layers import check_layers
from fused_tp.parallelizing.sequence_sharding import Parallelism
from fused_tp.parallelizing.shard_plan import (
    HEAD_PROJECTIONS,
    ShardingPlan,
    check_experts,
    check_head_counts,
    check_none_distributed,
    head_counts,
    is_kv_count,
    plan_experts,
    resolve_plan,
    settle_between,
    spec_of,
    value_of,
)
from fused_tp.parallelizing.whole_blocks import find_blocks
from fused_tp.pipelining.stages import container_name
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.model_shape import Attention, Block, Layer, ModelShape, Weights

# Names in the code of attention classes that do not call transformers' attention interface.
_SOFTMAX = {"softmax", "Softmax", "scaled_dot_product_attention"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_top_k", "moe_topk", "moe_k", "topk"),
    *("top_k_experts", "num_selected_experts"),
)
_DOWN_PROJECTIONS = (
    "down",
    "output",
    "out_proj",
    "w2",
)  # parts of names of expert weights that map back to the hidden state


def count_config(config: Any) -> ModelShape:
    """Count the causal language model that transformers creates from `config`.

    Raises:
        ValueError: transformers cannot create the model; the message says why.
    """
    try:
        model = make_on_meta(config)
    except Exception as error:  # any error: an invalid config, a missing library
        raise ValueError(
            f"transformers cannot create a causal language model from the config of {_model_name(config)}: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return count_model(model)


def _model_name(config: Any) -> str:
    return getattr(config, "name_or_path", "") or config.model_type


def make_on_meta(config: Any) -> nn.Module:
    """Create the causal language model of a transformers config on the meta device, without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return model


def count_model(model: Any) -> ModelShape:
    """Count a model created by `make_on_meta`. Removes all but one layer of each kind from the model."""
    name, text = _model_name(model.config), model.config.get_text_config()
    parts = _LayerParts(model)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    hidden = value_of(text, "hidden_size") or embedding.weight.shape[-1]
    drop_repeated(model, parts)
    checked = PlanCheck(model, parts, name)
    counter = _Counter(hidden, text, checked.plan)
    kinds = [counter.layer(kind) for kind in parts.kinds]
    tied = output is not None and output.weight is embedding.weight
    of_output = [] if output is None else [one for one in parts.outside if one.module is output]
    around = [one for one in parts.outside if tied or one.module is not output]
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=value_of(text, "vocab_size") or (0 if output is None else features_of(output)[1]),
        stack=tuple(kinds[number] for number in parts.order),
        embedding=counter.weights(_first_occurrences(around)),
        output=counter.weights(of_output),
        tied=tied,
        notes=(*parts.notes, *counter.notes(parts, kinds), *_outside_notes(_first_occurrences(around), output)),
        check=checked.check,
    )


# -- the parts of a model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HeldParameter:
    """A parameter and a module that holds it.

    Attributes:
        path: path of the module in the model.
        inside: path of the module in its layer; equal to `path` outside the layers.
        first: True if no earlier module holds the same parameter.
    """

    path: str
    inside: str
    module: nn.Module
    key: str
    parameter: nn.Parameter
    first: bool

    @property
    def is_expert(self) -> bool:
        """True if the parameter belongs to routed experts."""
        if "experts" in self.path.split("."):
            return True
        count = _first_positive_int(_EXPERTS, self.module)
        return self.parameter.ndim == 3 and not isinstance(self.module, _ConvNd) and count == len(self.parameter)

    @property
    def multiplies(self) -> bool:
        """True if the parameter is the weight of a matmul or of a convolution."""
        return self.parameter.ndim > 1 and not isinstance(self.module, nn.Embedding) and "bias" not in self.key


class _LayerParts:
    """Layers of a model with their parameters, and the parameters outside the layers.

    Attributes:
        container: name of the nn.ModuleList of layers; "" if none is found, and the model then counts as one layer.
        kinds: distinct layers, each represented by its first layer.
        order: index into `kinds` for each layer.
        outside: parameters outside the layers.
        refusal: reason why no list of layers was found, raised by features that need one.
        modules: the layers.
        notes: messages about the choice of layers.
    """

    def __init__(self, model: Any) -> None:
        self.container, self.refusal = "", ""
        self.notes: list[str] = []
        self._find_container(model)
        inside = f"{self.container}."
        found: dict[int, list[_HeldParameter]] = {}
        self.outside: list[_HeldParameter] = []
        seen: set[int] = set()
        output = model.get_output_embeddings()
        for path, module in model.named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                number, within = -1, path
                if self.container and path.startswith(inside):
                    at, _, within = path.removeprefix(inside).partition(".")
                    number = int(at)
                elif not self.container and not isinstance(module, nn.Embedding) and module is not output:
                    number = 0
                held = _HeldParameter(path, within, module, key, parameter, id(parameter) not in seen)
                seen.add(id(parameter))
                (self.outside if number < 0 else found.setdefault(number, [])).append(held)
        self.modules = list(model.get_submodule(self.container).children()) if self.container else [model]
        types = value_of(model.config.get_text_config(), "layer_types") or ()
        numbers: dict[object, int] = {}
        self.kinds: list[_LayerKind] = []
        self.order = []
        for number, module in enumerate(self.modules):
            layer_type = types[number] if self.container and number < len(types) else ""
            held_by = found.get(number, [])
            what = (
                layer_type,
                type(module),
                tuple((one.inside, type(one.module), one.key, one.parameter.shape, one.first) for one in held_by),
                tuple(getattr(one, "sliding_window", None) for one in module.modules()),
            )
            if what not in numbers:
                numbers[what] = len(self.kinds)
                self.kinds.append(_LayerKind(number, module, layer_type, held_by))
            self.order.append(numbers[what])

    def _find_container(self, model: Any) -> None:
        try:
            self.container = container_name(model, None)
            return
        except ValueError as error:
            self.refusal = str(error)
        text = model.config.get_text_config()
        for name, module in model.named_modules():
            if name and getattr(module, "config", None) is text and text is not model.config:
                try:
                    self.container = f"{name}.{container_name(module, None)}"
                except ValueError:
                    continue
                self.refusal = ""
                self.notes.append(
                    f"The layers of {self.container} are counted; pass layers={self.container!r} to build."
                )
                return
        self.notes.append(f"The model is counted as a single layer that runs once: {self.refusal}")


@dataclass(frozen=True)
class _LayerKind:
    """First of a set of equal layers, with its index, module and parameters."""

    number: int
    module: nn.Module
    layer_type: str
    held: list[_HeldParameter]


def drop_repeated(model: nn.Module, parts: _LayerParts) -> None:
    """Remove all but one layer of each kind from `model`, so that checks of deep models are fast."""
    if parts.container:
        layers: Any = model.get_submodule(parts.container)
        layers._modules.clear()
        for number, kind in enumerate(parts.kinds):
            layers.append(kind.module)
            prefix = f"{parts.container}.{number}"
            kind.held[:] = [replace(one, path=f"{prefix}.{one.inside}" if one.inside else prefix) for one in kind.held]


def _first_occurrences(held: Iterable[_HeldParameter]) -> list[_HeldParameter]:
    return [one for one in held if one.first]


# -- counts -----------------------------------------------------------------------------------------------------------


class _Counter:
    """Counts the weights, matmuls and attention of layers, as `plan` shards them."""

    def __init__(self, hidden: int, text: Any, plan: ShardingPlan) -> None:
        self.hidden, self.text, self.plan = hidden, text, plan

    def weights(self, held: Iterable[_HeldParameter]) -> Weights:
        return sum((Weights(one.parameter.numel(), self.sharded_numel(one)) for one in held), Weights())

    def sharded_numel(self, one: _HeldParameter) -> int:
        """Return the number of elements of a parameter that are sharded over tensor parallel ranks."""
        name = f"{one.path}.{one.key}" if one.path else one.key
        size = one.parameter.numel()
        if name in self.plan.parameters:
            return size
        spec = spec_of(self.plan.modules.get(one.path))
        if spec.shard_dim is None or (spec.shard_dim == 1 and one.parameter.ndim == 1):
            return 0
        if spec.shares_keys:
            taken, returned = features_of(one.module)
            return size * taken // returned
        return size

    def layer(self, kind: _LayerKind) -> Layer:
        dense = [one for one in kind.held if not one.is_expert]
        sparse = [one for one in kind.held if one.is_expert]
        experts, per_token = self._routing(kind, sparse) if sparse else (0, 0)
        share = per_token / experts if experts else 1.0
        return Layer(
            name=type(kind.module).__name__,
            weights=self.weights(_first_occurrences(dense)),
            expert_weights=self.weights(_first_occurrences(sparse)),
            experts=experts,
            experts_per_token=per_token,
            blocks=tuple(self._blocks(kind, share)),
            attention=tuple(self._attention(kind)),
            tensors=len(_first_occurrences(kind.held)),
        )

    def _routing(self, kind: _LayerKind, sparse: list[_HeldParameter]) -> tuple[int, int]:
        """Return the number of experts of a layer and the number per token; all experts if the config has no number."""
        lists = {match[0] for one in sparse if (match := re.search(r"experts\.\d+(?=\.|$)", one.path))}
        packed = (len(one.parameter) for one in sparse if one.parameter.ndim == 3)
        around = [module for module in kind.module.modules() if type(module).__name__ != "ModuleList"]
        experts = len(lists) or next(packed, 0) or _first_positive_int(_EXPERTS, *around, self.text)
        return experts, min(experts, _first_positive_int(_EXPERTS_PER_TOKEN, *around, self.text, default=experts))

    def _blocks(self, kind: _LayerKind, share: float) -> Iterator[Block]:
        """Yield the blocks of a layer: its matmuls, grouped by the submodule of the layer that contains them."""
        groups: dict[str, list[_HeldParameter]] = {}
        for one in kind.held:
            if one.multiplies:
                groups.setdefault(_block_key(one.inside), []).append(one)
        rest: list[_HeldParameter] = []
        for number, group in enumerate(groups.values(), 1):
            block = self._block([*rest, *group], share)
            # Column-parallel matmuls without a row-parallel one form a block together with the next group.
            rest = [*rest, *group] if block.wide and not block.narrow and number < len(groups) else []
            if not rest:
                yield block

    def _block(self, group: list[_HeldParameter], share: float) -> Block:
        wide = narrow = whole = kept = kept_whole = 0.0
        for one in group:
            active = share if one.is_expert else 1.0
            sharded = self.sharded_numel(one)
            part = sharded / one.parameter.numel()
            whole += active * (one.parameter.numel() - sharded)
            if self._is_row_parallel(one):
                narrow += active * sharded
            else:
                wide += active * sharded
            kept += active * part * self._kept_features(one)
            kept_whole += active * (1 - part) * self._kept_features(one)
        return Block(
            wide=wide / self.hidden,
            narrow=narrow / self.hidden,
            whole=whole / self.hidden,
            kept=kept,
            kept_whole=kept_whole,
            experts=any(one.is_expert for one in group),
        )

    def _is_row_parallel(self, one: _HeldParameter) -> bool:
        """True if the weight, if sharded, is row-parallel: it maps back to the hidden state."""
        if one.is_expert:
            return any(word in f"{one.inside}.{one.key}" for word in _DOWN_PROJECTIONS)
        return spec_of(self.plan.modules.get(one.path)).shard_dim == 1

    def _kept_features(self, one: _HeldParameter) -> int:
        """Return the number of features of a matmul that backward needs, excluding the hidden state."""
        *more, returned, taken = one.parameter.shape
        if isinstance(one.module, _ConvNd):
            return int(one.parameter.shape[0])
        count = 1
        for size in more:
            count *= size
        return count * int(taken if returned == self.hidden else returned)

    def _attention(self, kind: _LayerKind) -> Iterator[Attention]:
        for path, module in kind.module.named_modules():
            if _attends(module):
                held = [one for one in kind.held if f"{one.inside}.".startswith(f"{path}." if path else "")]
                yield self._attention_of(module, held, self._window(module, kind.layer_type))

    def _attention_of(self, module: nn.Module, held: list[_HeldParameter], window: int | None) -> Attention:
        linears = {one.inside.removesuffix(".linear").rpartition(".")[2]: one.module for one in held if one.multiplies}
        linears = {leaf: one for leaf, one in linears.items() if isinstance(one, nn.Linear) or is_conv1d(one)}
        back = [
            features_of(one)[0]
            for leaf, one in linears.items()
            if features_of(one)[1] == self.hidden and leaf not in HEAD_PROJECTIONS
        ]
        queries = [features_of(one)[1] for leaf, one in linears.items() if leaf in ("q_proj", "query", "q_lin", "q")]
        of_head = _first_positive_int(("v_head_dim", "head_dim", "attention_head_size", "head_size"), module)
        own, of_config = head_counts(module), head_counts(getattr(module, "config", None), self.text)
        heads = next((n for key, n in (own or of_config).items() if not is_kv_count(key)), 0)
        features = next(iter([*back, *queries]), of_head * heads or self.hidden)  # value features of all heads
        if of_head and features % of_head == 0 and not any(not is_kv_count(key) for key in own):
            heads = features // of_head
        values = features / max(heads, 1)
        scores = _first_positive_int(("qk_head_dim", "head_dim"), module) or values
        keys = linears.get("k_proj") or linears.get("key")
        is_latent = _first_positive_int(("qk_head_dim", "kv_lora_rank"), module) > 0
        if is_latent:
            kv_heads = heads
        elif keys is not None and features_of(keys)[1] % scores == 0:
            kv_heads = int(features_of(keys)[1] // scores)
        else:
            kv_heads = next((n for key, n in (own | of_config).items() if is_kv_count(key)), heads)
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=(scores + values) / 2,
            window=window,
            sharded=any(self.sharded_numel(one) for one in held),
        )

    def _window(self, module: nn.Module, layer_type: str) -> int | None:
        """Return the attention window of a layer in tokens; None for full causal attention."""
        words = {"sliding_attention": ("sliding_window",), "chunked_attention": ("attention_chunk_size",)}
        everywhere = () if value_of(self.text, "layer_types") else ("sliding_window",)
        found = _first_positive_int(words.get(layer_type, everywhere), getattr(module, "config", None), self.text)
        return _first_positive_int(("sliding_window",), module) or found or None

    def notes(self, parts: _LayerParts, kinds: list[Layer]) -> Iterator[str]:
        """Yield messages about operations that the cost model omits."""
        counts = Counter(parts.order)
        mixers: Counter[str] = Counter()
        for number, (kind, layer) in enumerate(zip(parts.kinds, kinds, strict=True)):
            mixers.update(dict.fromkeys(_mixers(kind.module), counts[number]))
            if layer.experts and layer.experts_per_token == layer.experts:
                yield f"Each token is assumed to use all {layer.experts} experts of {layer.name}."
        if not mixers and not any(layer.attention for layer in kinds):
            mixers.update(dict.fromkeys((layer.name for layer in kinds), len(parts.order)))
        if mixers:
            named = listed(f"{name} (in {count} of {len(parts.order)} layers)" for name, count in mixers.items())
            yield f"Only matmuls with weights are counted in {named}, not other operations on tokens or features."
        if chosen := _first_positive_int(("index_topk",), self.text):
            yield f"Attention is counted over all previous tokens, not over index_topk={chosen} selected ones."


def _mixers(layer: nn.Module) -> Iterator[str]:
    """Yield names of classes in a layer with operations beyond matmuls: convolutions, state space models, ..."""
    for path, module in layer.named_modules():
        name = type(module).__name__
        if isinstance(module, _ConvNd):
            yield name
        elif not path or _attends(module) or takes_routing(module):
            continue
        elif "attention" in name.lower():  # report the innermost attention class, not its wrappers
            if not any("attention" in type(one).__name__.lower() for one in module.modules() if one is not module):
                yield name
        elif "expert" not in name.lower() and "activation" not in name.lower():
            keys = module._parameters.keys() - {"weight"}
            if "dt_bias" in keys or not all("bias" in key for key in keys):
                yield name


def _block_key(inside: str) -> str:
    head, dot, _ = inside.partition(".")
    return head if dot else ""


def _first_positive_int(names: Iterable[str], *sources: object, default: int = 0) -> int:
    """Return the first positive integer among the attributes `names` of `sources`; `default` if there is none."""
    found = (value_of(source, name) for source in sources for name in names)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), default)


def _attends(module: nn.Module) -> bool:
    """True if the code of the module's class contains a softmax over scores."""
    kind: Any = type(module)
    return _has_softmax(kind)


@cache
def _has_softmax(kind: Any) -> bool:
    named = any(word in kind.__name__.lower() for word in ("attention", "attn"))
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            functions = (inspect.unwrap(one) for one in vars(base).values() if inspect.isfunction(one))
            read = {name for one in functions for name in _names_used(one.__code__)}
            if ATTENTION_REGISTRY in read or (named and not _SOFTMAX.isdisjoint(read)):
                return True
    return False


def _names_used(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals that `code` uses, including nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_used(constant)


def _outside_notes(around: list[_HeldParameter], output: nn.Module | None) -> Iterator[str]:
    others: Counter[str] = Counter()
    for one in around:
        if one.multiplies and one.module is not output:
            others[".".join(one.path.split(".")[:2])] += one.parameter.numel()
    if others:
        names = listed(f"{name} ({count / 1e6:,.1f} million)" for name, count in others.items())
        yield f"Weights outside the layers: {names}. Their memory is counted, their operations are not."


# -- unsupported configs ----------------------------------------------------------------------------------------------


class PlanCheck:
    """Checks of `parallelize` and `build` that need no ranks, on a model on the meta device."""

    def __init__(self, model: Any, parts: _LayerParts, name: str) -> None:
        self.model, self.parts, self.name = model, parts, name
        try:
            self.plan = settle_between(model, resolve_plan(model, "auto"))
        except (TypeError, ValueError):
            self.plan = ShardingPlan()  # `check` raises with the reason
        self._refusal: Callable[..., str] = cache(self._find_refusal)

    def check(self, config: ParallelConfig) -> None:
        """Raise ValueError with the reason if `build` would reject the model in `config`."""
        needs_layers = config.pp > 1 or config.recompute == "full" or config.is_sharded
        refusal = self.parts.refusal if needs_layers else ""
        refusal = refusal or self._refusal(
            config.tp, config.cp > 1, config.ep, config.sequence_parallel, config.loss_parallel
        )
        if refusal:
            raise ValueError(f"{self.name} cannot run at {config.shown()}: {refusal}")

    def _find_refusal(self, tp: int, over_cp: bool, ep: int, sequence_parallel: bool, loss_parallel: bool) -> str:
        model = self.model
        mesh: Any = object()  # placeholder: these checks only compare the mesh with None
        parallelism = Parallelism(
            mesh if tp > 1 else None, mesh if over_cp else None, sequence_parallel, loss_parallel, True
        )
        try:
            plan = resolve_plan(model, "auto") if tp > 1 else ShardingPlan()
            if ep > 1:
                plan_experts(model, plan, "auto", ep, whole=tp == 1)
            else:
                check_none_distributed(plan, None)
            if tp > 1:
                plan = settle_between(model, plan, shards_logits=loss_parallel)
                check_head_counts(model, plan.modules, tp)
                check_experts(model, plan)
            check_layers(model, plan, tp)
            check_transformers_model(model, plan.modules, parallelism)
            if sequence_parallel:
                find_blocks(model, plan, rows_travel=ep > 1)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""
