"""Splitting of a model into pipeline stages: find the split points, balance the layers, build the stages.

A model can be split between the layers of one nn.ModuleList, if layers pass only the hidden state to each other. To
verify this, the model runs once on a few tokens, and gradients are traced through its parts:

    inputs --> modules before --> hidden --> layer 0 --> ... --> layer L-1 --> hidden --> modules after --> output

A gradient path between two of these parts that bypasses the hidden state is a connection that a split would break.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from fused_tp.parallelizing.checks.undisturbed import Mode, preserve_state
from fused_tp.parallelizing.outputs import find_tensors
from fused_tp.parallelizing.shard_plan import config_value

PROBE_TOKENS = 8


@dataclass(frozen=True)
class ModelLayers:
    """Parts of a model that can be split into stages.

    Attributes:
        container: name of the ModuleList of layers.
        num_layers: number of layers.
        modules_before_layers: names of modules with parameters of their own that run before the layers.
        modules_after_layers: names of modules with parameters of their own that run after the layers.
        returned_count: number of values that a layer returns, the hidden state first; 0: the hidden state alone.
        hidden_size, dtype: size and dtype of the hidden state [batch, seq, hidden].
    """

    container: str
    num_layers: int
    modules_before_layers: tuple[str, ...]
    modules_after_layers: tuple[str, ...]
    returned_count: int
    hidden_size: int
    dtype: torch.dtype


def find_layers(model: nn.Module, container: str | None, example: Mapping[str, Any]) -> ModelLayers:
    """Find the parts of `model` that can be split into stages.

    Args:
        container: name of the ModuleList of layers; None: the one in transformers' plan for pipelines, or the only
            one in the model.
        example: keyword arguments of a forward pass on a few tokens.

    Raises:
        ValueError: the model cannot be split; the message names the reason.
    """
    name = find_container(model, container)
    layers = cast(nn.ModuleList, model.get_submodule(name))
    # The trial runs must not change buffers, nor counters and other variables of the callers' code.
    with preserve_state([model], Mode.AS_IT_IS, with_gradients=True):
        model_layers = _Probe(model, name, layers).run(example)
        _check_skeleton(model, model_layers, example)
    return model_layers


def _check_skeleton(model: nn.Module, layers: ModelLayers, example: Mapping[str, Any]) -> None:
    """Refuse a model whose code does not run without its layers and the modules before and after them."""
    layer_ranges = [range(1), range(1, 1), range(1, layers.num_layers)]
    skeleton, boundary = take_stages(model, layers, layer_ranges, [1])[1]
    tokens = next(t for t in example.values() if isinstance(t, Tensor) and t.ndim > 1)
    device = next((p.device for p in model.parameters()), tokens.device)
    boundary.received_hidden = torch.zeros(*tokens.shape[:2], layers.hidden_size, dtype=layers.dtype, device=device)
    try:
        with torch.no_grad():
            skeleton(**example)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run without its layers, but each stage has only some of them: "
            f"{type(error).__name__}: {error}"
        ) from error
    if boundary.sent_hidden is None:
        raise ValueError(f"{type(model).__name__} has one layer, which cannot be divided over stages.")


def find_container(model: nn.Module, requested_name: str | None) -> str:
    """Return the name of the nn.ModuleList of layers: `requested_name`, or the one that `find_layers` selects for None.

    Raises:
        ValueError: the model has no such list with parameters, or several candidates.
    """
    class_name = type(model).__name__
    module_lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    module_lists = {
        name: module for name, module in module_lists.items() if next(module.parameters(), None) is not None
    }
    if requested_name is not None:
        if requested_name not in module_lists:
            raise ValueError(
                f"{class_name} has no nn.ModuleList {requested_name!r}; it has "
                f"{', '.join(map(repr, module_lists)) or 'none'}."
            )
        return requested_name
    base_model = getattr(model, "base_model", model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base_model and name), "")
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    planned_names = [prefix + part for part in plan if prefix + part in module_lists]
    outermost_names = [
        name for name in module_lists if not any(name.startswith(f"{other_name}.") for other_name in module_lists)
    ]
    candidates = planned_names or outermost_names
    if len(candidates) != 1:
        raise ValueError(
            f"{class_name} has {len(candidates)} lists of layers ({', '.join(map(repr, candidates)) or 'none'}), and "
            "its config does not say which to split. Pass layers=, the name of the nn.ModuleList whose layers pass one "
            "hidden state on."
        )
    return candidates[0]


class _Probe:
    """One forward pass observed by hooks, to check that layers pass on only the hidden state."""

    def __init__(self, model: nn.Module, container: str, layers: nn.ModuleList) -> None:
        self.model, self.container, self.layers = model, container, layers
        self.class_name = type(model).__name__
        self.layer_calls = 0  # layer calls so far
        self.hidden: Tensor | None = None  # hidden state returned by the latest layer
        self.hidden_leaves: list[Tensor] = []  # hidden state of each layer, as a leaf
        self.modules_before_layers: dict[str, list[Tensor]] = {}  # results of modules before the layers, as leaves
        self.modules_after_layers: list[str] = []
        self.returned_count = 0

    def run(self, example: Mapping[str, Any]) -> ModelLayers:
        layer_prefix = f"{self.container}."
        with ExitStack() as stack, torch.enable_grad():
            for name, module in self.model.named_modules():
                if module in self.layers:
                    index = int(name.removeprefix(layer_prefix))
                    stack.enter_context(
                        module.register_forward_pre_hook(partial(self.before_layer, index), with_kwargs=True)
                    )
                    stack.enter_context(module.register_forward_hook(partial(self.after_layer, index)))
                elif _has_parameters(module) and not name.startswith(layer_prefix) and not self.contains_layers(name):
                    stack.enter_context(module.register_forward_hook(partial(self.after_other_module, name)))
            # Training mode, because eval mode would hide dropout between layers.
            stack.enter_context(training_mode([self.model], is_training=True))
            output = self.model(**example)
        if self.layer_calls != len(self.layers):
            raise ValueError(
                f"{self.class_name} ran {self.layer_calls} of the {len(self.layers)} layers of {self.container!r}; a "
                "pipeline needs each layer to run once."
            )
        self.check_modules_after_layers(output)
        self.check_parameters()
        assert self.hidden is not None
        return ModelLayers(
            self.container,
            len(self.layers),
            tuple(self.modules_before_layers),
            tuple(self.modules_after_layers),
            self.returned_count,
            self.hidden.shape[-1],
            self.hidden.dtype,
        )

    def contains_layers(self, name: str) -> bool:
        return not name or self.container.startswith(f"{name}.")

    def before_layer(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index != self.layer_calls:
            raise ValueError(
                f"{self.class_name} runs layer {index} of {self.container!r} where layer {self.layer_calls} was "
                "expected; a pipeline needs its layers to run once each, in their order."
            )
        name = f"{self.container}.{index}"
        hidden = args[0] if args else kwargs.get("hidden_states")
        if index and hidden is not self.hidden:
            raise ValueError(
                f"the first argument of {name} must be the hidden state that the previous layer returned, unchanged: "
                "stages do not run code between layers. Move that code into a layer."
            )
        other_arguments: list[tuple[Any, Any]] = [*((f"argument {i}", value) for i, value in enumerate(args[1:], 1))]
        other_arguments += [(key, value) for key, value in kwargs.items() if value is not hidden]
        for key, value in other_arguments:
            if any(t.requires_grad for t in find_tensors(value)):
                raise ValueError(
                    f"{name} receives {key}, which is computed from embeddings or earlier layers and requires a "
                    f"gradient. Stages pass only hidden_states; compute {key} inside the layer."
                )

    def after_layer(self, index: int, layer: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise ValueError(
                f"{self.container}.{index} returns {_describe(hidden)} where a pipeline needs its hidden state "
                "[batch, seq, hidden], by itself or first in a tuple."
            )
        self.returned_count = len(output) if isinstance(output, tuple) else 0
        self.layer_calls += 1
        leaf, self.hidden = _leaf_and_result(hidden)
        self.hidden_leaves.append(leaf)
        return (self.hidden, *output[1:]) if self.returned_count else self.hidden

    def after_other_module(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if self.layer_calls == len(self.layers):
            if name not in self.modules_after_layers:
                self.modules_after_layers.append(name)
            return None
        if self.layer_calls:
            raise ValueError(
                f"{self.class_name} runs {name!r}, which has parameters, between layers of {self.container!r}; a stage "
                "can contain only modules that run before all layers or after all of them."
            )
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise ValueError(
                f"{name!r} runs before the layers and returns {_describe(output)}, not a tensor of floats."
            )
        leaf, result = _leaf_and_result(output)
        self.modules_before_layers.setdefault(name, []).append(leaf)
        return result

    def check_modules_after_layers(self, output: Any) -> None:
        outputs = [t for t in find_tensors(output) if t.requires_grad]
        earlier_results = [("hidden states of earlier layers", self.hidden_leaves[:-1])]
        earlier_results += [
            (f"the output of {name!r}", tensors) for name, tensors in self.modules_before_layers.items()
        ]
        for description, tensors in earlier_results:
            if outputs and tensors:
                grads = torch.autograd.grad(
                    [t.sum() for t in outputs], tensors, allow_unused=True, retain_graph=True, materialize_grads=False
                )
                if any(grad is not None for grad in grads):
                    raise ValueError(
                        f"{self.class_name} uses {description} after its last layer, which the last stage does not "
                        "have. This is not supported in a pipeline."
                    )

    def check_parameters(self) -> None:
        placed_modules = {*self.modules_before_layers, *self.modules_after_layers}
        called_twice = set(self.modules_before_layers) & set(self.modules_after_layers)
        if called_twice:
            raise ValueError(f"{self.class_name} runs {sorted(called_twice)} both before and after its layers.")
        for name, module in self.model.named_modules():
            if (
                _has_parameters(module)
                and name not in placed_modules
                and not f"{name}.".startswith(f"{self.container}.")
            ):
                raise ValueError(
                    f"{name or self.class_name!r} has parameters ({', '.join(module._parameters)}) but is not called "
                    "as a module before or after the layers, so it cannot be assigned to a stage. Move them into a "
                    "separate module that is called there."
                )


@contextmanager
def training_mode(models: Iterable[nn.Module], *, is_training: bool) -> Iterator[None]:
    """Set training or eval mode on `models`; on exit, restore the mode of each of their modules."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for module in modes:
            module.training = is_training
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def zeros_for_meta_tensors(model: nn.Module) -> Iterator[None]:
    """Replace tensors of `model` on the meta device by zeros that take no memory: enough to trace the data flow."""
    meta_tensors: list[tuple[dict[str, Any], str, Tensor]] = []
    zeros: dict[int, Tensor] = {}  # one for each tied weight
    for module in model.modules():
        module_tensors: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in module_tensors:
            for name, t in tensors.items():
                if t is not None and t.is_meta:
                    meta_tensors.append((tensors, name, t))
                    zero = _unwritten_zeros(t)
                    if isinstance(t, nn.Parameter):
                        zero = nn.Parameter(zero, requires_grad=t.requires_grad)
                    tensors[name] = zeros.setdefault(id(t), zero)
    try:
        yield
    finally:
        for tensors, name, t in meta_tensors:
            tensors[name] = t


def _unwritten_zeros(t: Tensor) -> Tensor:
    """Return zeros like `t` on the CPU, in pages that take no memory until written.

    Rejected: torch.zeros, which writes all pages; one expanded zero, whose strides not all ops accept.
    """
    if not t.numel():
        return torch.zeros(t.shape, dtype=t.dtype, device="cpu")
    pages = mmap.mmap(-1, t.numel() * t.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=t.dtype).view(t.shape)


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _leaf_and_result(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return a leaf with the values of `t`, and a copy of it to replace `t`, which may be written in place."""
    leaf = t.detach().requires_grad_()
    return leaf, leaf.clone()


def _describe(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# -- costs ------------------------------------------------------------------------------------------------------------


def estimated_costs(model: nn.Module, layers: ModelLayers) -> list[float]:
    """Return the cost of each layer in multiplications per token; modules outside count to the first or last layer.

    Embeddings cost nothing. Only the experts that a token is sent to are counted, if the config states their number.
    """
    config: Any = getattr(model, "config", None)
    text_config: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_experts = next(
        (n for key in _EXPERT_COUNT_NAMES if isinstance(n := config_value(text_config, key), int) and n), 0
    )
    num_active_experts = next(
        (n for key in _EXPERTS_PER_TOKEN_NAMES if isinstance(n := config_value(text_config, key), int) and n),
        num_experts,
    )

    def count_multiplications(module: nn.Module) -> float:
        num_multiplications = 0.0
        for name, submodule in module.named_modules():
            if not isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)):
                numel = sum(p.numel() for p in submodule._parameters.values() if p is not None and p.ndim > 1)
                is_expert = num_experts and ("experts" in name.split(".") or name.rpartition(".")[2] == "experts")
                num_multiplications += numel * num_active_experts / num_experts if is_expert else numel
        return num_multiplications

    costs = [count_multiplications(layer) for layer in model.get_submodule(layers.container).children()]
    costs[0] += sum(count_multiplications(model.get_submodule(name)) for name in layers.modules_before_layers)
    costs[-1] += sum(count_multiplications(model.get_submodule(name)) for name in layers.modules_after_layers)
    return costs


_EXPERT_COUNT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN_NAMES = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def share_out(costs: Sequence[float], stages: int) -> list[range]:
    """Assign consecutive layers to stages, at least one each; minimize the highest stage cost, then the next highest.

    Raises:
        ValueError: there are fewer layers than stages, or a cost is not a finite number of at least zero.

    Example:
        share_out([1, 1, 1, 3], 2)  # [range(0, 3), range(3, 4)]
    """
    num_layers = len(costs)
    if num_layers < stages:
        raise ValueError(
            f"{num_layers} layers cannot be divided over {stages} stages: each stage needs at least one layer."
        )
    if not all(isinstance(c, (int, float)) and 0 <= c < float("inf") for c in costs):
        raise ValueError(f"costs must be finite numbers, zero or greater, got {list(costs)}.")
    cumulative_costs = [0.0, *accumulate(costs)]
    # best_splits[n]: best split of the first n layers over the stages so far: (stage costs in descending order, first
    # layers).
    best_splits: dict[int, tuple[list[float], list[int]]] = {0: ([], [])}
    for stage in range(stages):
        num_later_stages = stages - stage - 1
        next_best: dict[int, tuple[list[float], list[int]]] = {}
        for start, (stage_costs, starts) in best_splits.items():
            for stop in [num_layers] if not num_later_stages else range(start + 1, num_layers - num_later_stages + 1):
                candidate = (
                    sorted([*stage_costs, cumulative_costs[stop] - cumulative_costs[start]], reverse=True),
                    [*starts, start],
                )
                if stop not in next_best or candidate[0] < next_best[stop][0]:
                    next_best[stop] = candidate
        best_splits = next_best
    starts = [*best_splits[num_layers][1], num_layers]
    return [range(start, stop) for start, stop in pairwise(starts)]


# -- stages -----------------------------------------------------------------------------------------------------------


class Boundary:
    """Hidden states that a stage receives and sends during one forward pass."""

    def __init__(self) -> None:
        self.received_hidden: Tensor | None = None
        self.sent_hidden: Tensor | None = None


class LayerPlaceholder(nn.Identity):
    """Placeholder for a layer of another stage: passes the hidden state on unchanged.

    The last layer before the stage (`is_before_stage`) returns the received hidden state instead; the first layer after
    the stage (`is_after_stage`) stores the hidden state to send.
    """

    def __init__(
        self, layer: nn.Module, boundary: Boundary, *, is_before_stage: bool, is_after_stage: bool, returned_count: int
    ) -> None:
        super().__init__()
        self.boundary = boundary
        self.is_before_stage, self.is_after_stage, self.returned_count = (
            is_before_stage,
            is_after_stage,
            returned_count,
        )
        for name, value in vars(layer).items():  # models read attributes of layers, such as the type of attention
            if name not in vars(self) and isinstance(value, (str, int, float, type(None))):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.is_before_stage:
            hidden = self.boundary.received_hidden
        if self.is_after_stage:
            self.boundary.sent_hidden = hidden
        return (hidden, *[None] * (self.returned_count - 1)) if self.returned_count else hidden


class EmbeddingPlaceholder(nn.Identity):
    """Placeholder for an embedding: returns zeros of the hidden state's shape, which no layer reads."""

    def __init__(self, module: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        self.boundary = boundary
        self.weight = _empty_weight(module)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        received_hidden = self.boundary.received_hidden
        assert received_hidden is not None
        return torch.zeros_like(received_hidden)


def _empty_weight(module: nn.Module) -> Tensor | None:
    """Return an empty tensor in place of a module's weight: models read dtype and device of the weight."""
    weight = getattr(module, "weight", None)
    return weight.detach().new_empty(0) if isinstance(weight, Tensor) else None


class OutputPlaceholder(nn.Identity):
    """Placeholder for a norm or an output layer: returns its input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weight = _empty_weight(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


def take_stages(
    model: nn.Module, layers: ModelLayers, parts: Sequence[range], stage_indices: Sequence[int]
) -> dict[int, tuple[nn.Module, Boundary]]:
    """Build the stages with these `stage_indices`, each a model of the same class that shares modules with `model`.

    Modules without parameters that all stages need (rotary embeddings) are copied for each stage.
    """
    container = model.get_submodule(layers.container)
    all_layers = list(container.children())
    # A model and its layers share one config, so it is not copied here; `parallelize` copies it for each stage.
    configs = {id(m.config): m.config for m in model.modules() if "config" in vars(m)}
    stages = {}
    for stage_index in stage_indices:
        stage_layers, boundary, last_stage = parts[stage_index], Boundary(), len(parts) - 1
        memo: dict[int, Any] = dict(configs)
        for index, layer in enumerate(all_layers):
            memo[id(layer)] = (
                layer
                if index in stage_layers
                else LayerPlaceholder(
                    layer,
                    boundary,
                    is_before_stage=index == stage_layers.start - 1,
                    is_after_stage=index == stage_layers.stop,
                    returned_count=layers.returned_count,
                )
            )
        for name in layers.modules_before_layers:
            module = model.get_submodule(name)
            memo[id(module)] = module if stage_index == 0 else EmbeddingPlaceholder(module, boundary)
        for name in layers.modules_after_layers:
            module = model.get_submodule(name)
            memo[id(module)] = module if stage_index == last_stage else OutputPlaceholder(module)
        stages[stage_index] = copy.deepcopy(model, memo), boundary
    return stages
