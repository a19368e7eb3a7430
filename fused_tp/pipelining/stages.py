"""Splitting of a model into pipeline stages: find the split points, balance the layers, build the stages.

A model can be split between the layers of one nn.ModuleList, if layers pass only the hidden state to each other. To
verify this, the model runs once on a few tokens, and gradients are traced through its parts:

    inputs --> in front --> hidden --> layer 0 --> hidden --> ... --> layer L-1 --> hidden --> behind --> output

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
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.parallelizing.outputs import find_tensors
from fused_tp.parallelizing.shard_plan import value_of

PROBE_TOKENS = 8


@dataclass(frozen=True)
class ModelLayers:
    """Parts of a model that can be split into stages.

    Attributes:
        container: name of the ModuleList of layers.
        count: number of layers.
        in_front: names of modules with parameters of their own that run before the layers.
        behind: names of modules with parameters of their own that run after the layers.
        returned: length of the tuple that a layer returns, the hidden state first; 0: the hidden state alone.
        hidden_size, dtype: size and dtype of the hidden state [batch, seq, hidden].
    """

    container: str
    count: int
    in_front: tuple[str, ...]
    behind: tuple[str, ...]
    returned: int
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
    name = container_name(model, container)
    layers = model.get_submodule(name)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"layers={name!r} is a {type(layers).__name__}; name an nn.ModuleList of one or more layers.")
    # The trial run must not change buffers such as counters and running means.
    held = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        found = _Probe(model, name, layers).run(example)
        _check_skeleton(model, found, example)
        return found
    finally:
        with torch.no_grad():
            for buffer, value in held:
                buffer.copy_(value)


def _check_skeleton(model: nn.Module, layers: ModelLayers, example: Mapping[str, Any]) -> None:
    """Refuse a model whose code does not run without its layers and the modules before and after them."""
    parts = [range(1), range(1, 1), range(1, layers.count)]
    skeleton, boundary = take_stages(model, layers, parts, [1])[1]
    tokens = next(t for t in example.values() if isinstance(t, Tensor) and t.ndim > 1)
    device = next((p.device for p in model.parameters()), tokens.device)
    boundary.received = torch.zeros(*tokens.shape[:2], layers.hidden_size, dtype=layers.dtype, device=device)
    try:
        with torch.no_grad():
            skeleton(**example)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run without its layers, as stages do that have only some of them: "
            f"{type(error).__name__}: {error}"
        ) from error
    if boundary.sent is None:
        raise ValueError(f"{type(model).__name__} has one layer, which cannot be shared out over stages.")


def container_name(model: nn.Module, given: str | None) -> str:
    kind = type(model).__name__
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = {name: module for name, module in lists.items() if next(module.parameters(), None) is not None}
    if given is not None:
        if given not in lists:
            raise ValueError(f"{kind} has no nn.ModuleList {given!r}; it has {', '.join(map(repr, lists)) or 'none'}.")
        return given
    base = getattr(model, "base_model", model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    named = [prefix + part for part in plan if prefix + part in lists]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = named or outermost
    if len(found) != 1:
        raise ValueError(
            f"{kind} has {len(found)} lists of layers ({', '.join(map(repr, found)) or 'none'}), and none that is said "
            "to be split; pass layers=, the name of the nn.ModuleList whose layers pass one hidden state on."
        )
    return found[0]


class _Probe:
    """One forward pass observed by hooks, to check that layers pass on only the hidden state."""

    def __init__(self, model: nn.Module, container: str, layers: nn.ModuleList) -> None:
        self.model, self.container, self.layers = model, container, layers
        self.kind = type(model).__name__
        self.calls = 0  # layer calls so far
        self.hidden: Tensor | None = None  # hidden state returned by the latest layer
        self.leaves: list[Tensor] = []  # hidden state of each layer, as a leaf
        self.in_front: dict[str, list[Tensor]] = {}  # results of modules before the layers, as leaves
        self.behind: list[str] = []
        self.returned = 0

    def run(self, example: Mapping[str, Any]) -> ModelLayers:
        inside = f"{self.container}."
        with ExitStack() as stack, torch.enable_grad():
            for name, module in self.model.named_modules():
                if module in self.layers:
                    index = int(name.removeprefix(inside))
                    stack.enter_context(module.register_forward_pre_hook(partial(self.enter, index), with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(partial(self.leave, index)))
                elif _holds_parameters(module) and not name.startswith(inside) and not self.holds_layers(name):
                    stack.enter_context(module.register_forward_hook(partial(self.outside, name)))
            stack.enter_context(in_mode([self.model], training=True))  # eval mode would hide dropout between layers
            stack.enter_context(torch.random.fork_rng())
            output = self.model(**example)
        if self.calls != len(self.layers):
            raise ValueError(
                f"{self.kind} ran {self.calls} of the {len(self.layers)} layers of {self.container!r}; a pipeline "
                "needs each of them once."
            )
        self.check_behind(output)
        self.check_parameters()
        assert self.hidden is not None
        return ModelLayers(
            self.container,
            len(self.layers),
            tuple(self.in_front),
            tuple(self.behind),
            self.returned,
            self.hidden.shape[-1],
            self.hidden.dtype,
        )

    def holds_layers(self, name: str) -> bool:
        return not name or self.container.startswith(f"{name}.")

    def enter(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index != self.calls:
            raise ValueError(
                f"{self.kind} runs layer {index} of {self.container!r} where layer {self.calls} was expected; a "
                "pipeline needs its layers to run once each, in their order."
            )
        name = f"{self.container}.{index}"
        given = args[0] if args else kwargs.get("hidden_states")
        if index and given is not self.hidden:
            raise ValueError(
                f"the first argument of {name} must be the hidden state that the previous layer returned, unchanged: "
                "stages do not run code between layers. Move that code into a layer."
            )
        others: list[tuple[Any, Any]] = [*((f"argument {at}", value) for at, value in enumerate(args[1:], 1))]
        others += [(key, value) for key, value in kwargs.items() if value is not given]
        for key, value in others:
            if any(t.requires_grad for t in find_tensors(value)):
                raise ValueError(
                    f"{name} receives {key}, which is computed from embeddings or earlier layers and requires a "
                    f"gradient. Stages pass only hidden_states; compute {key} inside the layer."
                )

    def leave(self, index: int, layer: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise ValueError(
                f"{self.container}.{index} returns {_shown(hidden)} where a pipeline needs its hidden state "
                "[batch, seq, hidden], by itself or first in a tuple."
            )
        self.returned = len(output) if isinstance(output, tuple) else 0
        self.calls += 1
        leaf, self.hidden = _leaf_and_result(hidden)
        self.leaves.append(leaf)
        return (self.hidden, *output[1:]) if self.returned else self.hidden

    def outside(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if self.calls == len(self.layers):
            if name not in self.behind:
                self.behind.append(name)
            return None
        if self.calls:
            raise ValueError(
                f"{self.kind} runs {name!r}, which has parameters, between layers of {self.container!r}; only what "
                "runs before all layers or after all of them can be given to a stage."
            )
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise ValueError(f"{name!r} runs before the layers and returns {_shown(output)}, not a tensor of floats.")
        leaf, made = _leaf_and_result(output)
        self.in_front.setdefault(name, []).append(leaf)
        return made

    def check_behind(self, output: Any) -> None:
        made = [t for t in find_tensors(output) if t.requires_grad]
        before = [("hidden states of earlier layers", self.leaves[:-1])]
        before += [(f"the output of {name!r}", tensors) for name, tensors in self.in_front.items()]
        for what, tensors in before:
            if made and tensors:
                grads = torch.autograd.grad(
                    [t.sum() for t in made], tensors, allow_unused=True, retain_graph=True, materialize_grads=False
                )
                if any(grad is not None for grad in grads):
                    raise ValueError(
                        f"{self.kind} uses {what} after its last layer, which the last stage does not have. This is "
                        "not supported in a pipeline."
                    )

    def check_parameters(self) -> None:
        placed = {*self.in_front, *self.behind}
        both = set(self.in_front) & set(self.behind)
        if both:
            raise ValueError(f"{self.kind} runs {sorted(both)} both before and after its layers.")
        for name, module in self.model.named_modules():
            if _holds_parameters(module) and name not in placed and not f"{name}.".startswith(f"{self.container}."):
                raise ValueError(
                    f"{name or self.kind!r} has parameters ({', '.join(module._parameters)}) but is not called as a "
                    "module before or after the layers, so it cannot be assigned to a stage. Move them into a separate "
                    "module that is called there."
                )


@contextmanager
def in_mode(models: Iterable[nn.Module], *, training: bool) -> Iterator[None]:
    """Set training or eval mode on `models`; on exit, restore the mode of each of their modules."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for module in modes:
            module.training = training
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def with_zeros(model: nn.Module) -> Iterator[None]:
    """Replace tensors of `model` on the meta device by zeros that take no memory: enough to trace the data flow."""
    held: list[tuple[dict[str, Any], str, Tensor]] = []
    zeros: dict[int, Tensor] = {}  # one for each tied weight
    for module in model.modules():
        of_module: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in of_module:
            for name, t in tensors.items():
                if t is not None and t.is_meta:
                    held.append((tensors, name, t))
                    zero = _unwritten_zeros(t)
                    if isinstance(t, nn.Parameter):
                        zero = nn.Parameter(zero, requires_grad=t.requires_grad)
                    tensors[name] = zeros.setdefault(id(t), zero)
    try:
        yield
    finally:
        for tensors, name, t in held:
            tensors[name] = t


def _unwritten_zeros(t: Tensor) -> Tensor:
    """Zeros like `t` on the CPU, in pages that take no memory until written. (Rejected: torch.zeros, which writes
    them; one expanded zero, whose strides not all ops accept.)"""
    if not t.numel():
        return torch.zeros(t.shape, dtype=t.dtype, device="cpu")
    pages = mmap.mmap(-1, t.numel() * t.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=t.dtype).view(t.shape)


def _holds_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _leaf_and_result(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return a leaf with the values of `t`, and a copy of it to replace `t`, which may be written in place."""
    leaf = t.detach().requires_grad_()
    return leaf, leaf.clone()


def _shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# -- costs ------------------------------------------------------------------------------------------------------------


def estimated_costs(model: nn.Module, layers: ModelLayers) -> list[float]:
    """Cost of each layer in multiplications per token, including modules before the first and after the last layer.

    Embeddings cost nothing. Only the experts that a token is sent to are counted, if the config states their number.
    """
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    experts = next((n for key in _EXPERTS if isinstance(n := value_of(text, key), int) and n), 0)
    used = next((n for key in _EXPERTS_PER_TOKEN if isinstance(n := value_of(text, key), int) and n), experts)

    def cost(module: nn.Module) -> float:
        total = 0.0
        for name, one in module.named_modules():
            if not isinstance(one, (nn.Embedding, nn.EmbeddingBag)):
                sizes = sum(p.numel() for p in one._parameters.values() if p is not None and p.ndim > 1)
                is_expert = experts and ("experts" in name.split(".") or name.rpartition(".")[2] == "experts")
                total += sizes * used / experts if is_expert else sizes
        return total

    costs = [cost(layer) for layer in model.get_submodule(layers.container).children()]
    costs[0] += sum(cost(model.get_submodule(name)) for name in layers.in_front)
    costs[-1] += sum(cost(model.get_submodule(name)) for name in layers.behind)
    return costs


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def share_out(costs: Sequence[float], stages: int) -> list[range]:
    """Assign consecutive layers to stages, at least one each; minimize the highest stage cost, then the next highest.

    Raises:
        ValueError: there are fewer layers than stages, or a cost is not a finite number of at least zero.

    Example:
        share_out([1, 1, 1, 3], 2)  # [range(0, 3), range(3, 4)]
    """
    count = len(costs)
    if count < stages:
        raise ValueError(f"{count} layers cannot be shared out over {stages} stages, of which each needs one at least.")
    if not all(isinstance(c, (int, float)) and 0 <= c < float("inf") for c in costs):
        raise ValueError(f"costs are {list(costs)}; they must be numbers, zero or greater.")
    sums = [0.0, *accumulate(costs)]
    # best[n]: best split of the first n layers over the stages so far, (stage costs in descending order, first layers).
    best: dict[int, tuple[list[float], list[int]]] = {0: ([], [])}
    for stage in range(stages):
        last = stages - stage - 1
        found: dict[int, tuple[list[float], list[int]]] = {}
        for start, (ordered, starts) in best.items():
            for stop in [count] if not last else range(start + 1, count - last + 1):
                option = sorted([*ordered, sums[stop] - sums[start]], reverse=True), [*starts, start]
                if stop not in found or option[0] < found[stop][0]:
                    found[stop] = option
        best = found
    starts = [*best[count][1], count]
    return [range(start, stop) for start, stop in pairwise(starts)]


# -- stages -----------------------------------------------------------------------------------------------------------


class Boundary:
    """Hidden states that a stage receives and sends during one forward pass."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.sent: Tensor | None = None


class Absent(nn.Identity):
    """Placeholder for a layer of another stage: passes the hidden state on unchanged.

    The last layer before the stage returns the received hidden state instead (`receives`); the first layer after the
    stage stores the hidden state to send (`sends`).
    """

    def __init__(self, layer: nn.Module, boundary: Boundary, *, receives: bool, sends: bool, returned: int) -> None:
        super().__init__()
        self.boundary = boundary
        self.receives, self.sends, self.returned = receives, sends, returned
        for name, value in vars(layer).items():  # models read attributes of layers, such as the type of attention
            if name not in vars(self) and isinstance(value, (str, int, float, type(None))):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.receives:
            hidden = self.boundary.received
        if self.sends:
            self.boundary.sent = hidden
        return (hidden, *[None] * (self.returned - 1)) if self.returned else hidden


class AbsentInFront(nn.Identity):
    """Placeholder for an embedding: returns zeros of the hidden state's shape, which no layer reads."""

    def __init__(self, module: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        self.boundary = boundary
        self.weight = _nothing_like(module)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        received = self.boundary.received
        assert received is not None
        return torch.zeros_like(received)


def _nothing_like(module: nn.Module) -> Tensor | None:
    """Empty placeholder for a weight: models read its dtype and device."""
    weight = getattr(module, "weight", None)
    return weight.detach().new_empty(0) if isinstance(weight, Tensor) else None


class AbsentBehind(nn.Identity):
    """Placeholder for a norm or an output layer: returns its input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weight = _nothing_like(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


def take_stages(
    model: nn.Module, layers: ModelLayers, parts: Sequence[range], wanted: Sequence[int]
) -> dict[int, tuple[nn.Module, Boundary]]:
    """Build the stages numbered `wanted`, each a model of the same class that shares modules with `model`.

    Modules without parameters that all stages need (rotary embeddings) are copied for each stage.
    """
    container = model.get_submodule(layers.container)
    of_layers = list(container.children())
    # A model and its layers share one config, so it is not copied here; `parallelize` copies it for each stage.
    configs = {id(m.config): m.config for m in model.modules() if "config" in vars(m)}
    found = {}
    for stage in wanted:
        part, boundary, last = parts[stage], Boundary(), len(parts) - 1
        memo: dict[int, Any] = dict(configs)
        for index, layer in enumerate(of_layers):
            memo[id(layer)] = (
                layer
                if index in part
                else Absent(
                    layer,
                    boundary,
                    receives=index == part.start - 1,
                    sends=index == part.stop,
                    returned=layers.returned,
                )
            )
        for name in layers.in_front:
            module = model.get_submodule(name)
            memo[id(module)] = module if stage == 0 else AbsentInFront(module, boundary)
        for name in layers.behind:
            module = model.get_submodule(name)
            memo[id(module)] = module if stage == last else AbsentBehind(module)
        found[stage] = copy.deepcopy(model, memo), boundary
    return found
