"""Blocks of a sequence parallel model that run on the whole sequence: state spaces, latent attention, unknown experts.

Between its layers a rank has a part of the tokens. A block that cannot be run on a part, or of which that is not known,
gets the tokens of all ranks and gives back this rank's; inside it runs as without sequence parallelism:

| what                | forward                    | backward                                                        |
|---------------------|----------------------------|-----------------------------------------------------------------|
| input [b, s / W, n] | gathered along dim 1       | own part: the block's backward gives all ranks the same         |
| layers inside       | as without                 | as without                                                      |
| output [b, s, n]    | own part                   | gathered                                                        |

A block is what a layer of the model calls: a module right below the elements of an nn.ModuleList.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from fused_tp.integrations.experts import takes_routing
from fused_tp.integrations.layers import HookArguments, attachments
from fused_tp.integrations.plan import Plan, spec_of, within
from fused_tp.integrations.sequence import SequenceSharding, in_one_order
from fused_tp.ops.collectives import gather, scatter


def find_blocks(model: nn.Module, plan: Plan, *, rows_travel: bool) -> tuple[list[str], list[str]]:
    """Names of the blocks of `model` that run on the whole sequence, and of those with experts that run on a part.

    `rows_travel`: to experts that are dealt out over other ranks than the tensor parallel ones. (Each of the latter
    sends the rows of all tokens then.)

    Raises:
        ValueError: a module that may not be run on a part of the sequence is in no block; or a `ParallelStyle`.
    """
    modules = dict(model.named_modules())
    found: dict[str, None] = {}
    for name, module in modules.items():
        style = plan.modules.get(name)
        if any(within(name, one) for one in (*plan.before, *plan.behind)):  # where no rank has a part of the sequence
            continue
        if isinstance(style, ParallelStyle):
            raise ValueError(
                f"The plan gives {name!r} a ParallelStyle; with sequence_parallel=True use style names, so that "
                "parallelize knows what each module does with the sequence."
            )
        spec = spec_of(style)
        owns = any(True for _ in module.parameters(recurse=False))
        known = style is not None or "norm" in type(module).__name__.lower() or isinstance(module, nn.Embedding)
        if not (spec.splits_input or spec.shares_rotary or spec.sums_output) and (known or not owns):
            continue
        block = _block_of(name, modules)
        if block is None and style is not None:
            raise ValueError(
                f"sequence_parallel=True: {name!r} has the style {style!r}, which takes whole sequences, and is not "
                "inside of a layer in an nn.ModuleList, whose input could be gathered. Pass sequence_parallel=False."
            )
        if block is None:
            raise ValueError(
                f"sequence_parallel=True: {name!r} ({type(module).__name__}) has parameters and is not in the plan, so "
                "whether it may see a part of the sequence is not known, nor what calls it. Give it a style, or pass "
                "sequence_parallel=False."
            )
        # A linear layer that stays whole, below a layer of the model, takes tokens one by one.
        if not (block == name and type(module) is nn.Linear and style is None):
            found[block] = None
    own = [] if rows_travel else [block for block in found if _takes_tokens_alone(block, modules[block], plan)]
    return [block for block in found if block not in own], own


RECORDERS = "transformers.utils.output_capturing"
KNOWN = ("transformers.models.", "transformers.activations", "torch.nn.modules.linear", "torch.nn.modules.activation")


def _takes_tokens_alone(name: str, block: nn.Module, plan: Plan) -> bool:
    """Whether `block` is one of experts that makes of a token what it makes of it alone.

    No look at a module tells that, so it is believed of nothing but transformers' own code as it is, which has been
    read, and is compared with the whole model type by type (tests/integrations/sweep.py). Any other block runs on the
    whole sequence:

    - one that is not, or has in it what is not, of a class of transformers' models or of torch's linear layers and
      activations; or that has a forward or hooks of its own, which may look at all tokens;
    - one that scales tokens or their scores by noise, of which ranks would draw different amounts: what all ranks draw
      after it would differ between them;
    - one that is given more than hidden states, which would have to be cut as these are;
    - one without experts that take routing, or in which a layer is given, or gives, more than a pair of a column and a
      row layer takes and gives.
    """
    experts = []
    for path, module in block.named_modules(prefix=name):
        spec = spec_of(plan.modules.get(path))
        if spec.sums_output:
            experts.append(path)
            served = takes_routing(module)
        else:
            served = not (spec.splits_input or spec.gathers_output or spec.shares_rotary or spec.shares_keys)
            served &= not spec.adds_once and not plan.parameters_of(path, module)
        alone = type(module).__module__.startswith(KNOWN) and not _may_look(module) and not _draws_noise(module)
        if not (served and alone):
            return False
    parameters = inspect.signature(type(block).forward).parameters.values()
    one = [p.kind for p in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2  # self, and hidden states
    return bool(experts) and one


def _may_look(module: nn.Module) -> bool:
    """Whether what is attached to `module` may look at what it is given; transformers' recorders of outputs only keep
    them."""
    recorders = all(getattr(hook, "__module__", "") == RECORDERS for hook in module._forward_hooks.values())
    return bool(set(attachments(module)) - ({"_forward_hooks"} if recorders else set()))


def _draws_noise(module: nn.Module) -> bool:
    """Whether `module` draws noise in training: transformers' routers keep how much under such a name."""
    return any("jitter" in name and value for name, value in vars(module).items())


def _block_of(name: str, modules: dict[str, nn.Module]) -> str | None:
    """The block that the module of that name is, or is in."""
    parts = name.split(".")
    for n in range(1, len(parts) - 1):
        if isinstance(modules[".".join(parts[:n])], nn.ModuleList):
            rest = range(n + 2, len(parts) + 1)
            names = (".".join(parts[:m]) for m in rest)
            return next((at for at in names if not isinstance(modules[at], nn.ModuleList)), None)
    return None


def run_whole(block: nn.Module, mesh: DeviceMesh, sequence: SequenceSharding, *, parts: Collection[str] = ()) -> None:
    """Hook `block`, whose layers run without sequence parallelism, to run on the whole sequence. `parts` names
    arguments beside the first of which a rank has its part, too."""
    # Before what a style has hooked there, which is for whole sequences.
    gather_input = partial(_gather_input, sequence, mesh, _places(block, parts))
    block.register_forward_pre_hook(gather_input, with_kwargs=True, prepend=True)
    in_one_order(block._forward_pre_hooks)
    block.register_forward_hook(partial(_scatter_output, sequence, mesh))


def split_before(module: nn.Module, arguments: Collection[str], mesh: DeviceMesh, sequence: SequenceSharding) -> None:
    """Hook `module` to be given this rank's tokens of `arguments`, which hold those of all ranks."""
    split_input = partial(_split_input, sequence, mesh, _places(module, arguments))
    module.register_forward_pre_hook(split_input, with_kwargs=True)


def join_behind(module: nn.Module, mesh: DeviceMesh, sequence: SequenceSharding) -> None:
    """Hook `module`, which sees this rank's tokens, to return those of all ranks to what runs on them."""
    module.register_forward_hook(partial(_gather_output, sequence, mesh))


def _gather_output(
    sequence: SequenceSharding, mesh: DeviceMesh, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    state = sequence.state_now()
    return gather(output, 1, group=mesh, gather_size=state.local_len) if state.tp_sharded else output


def _places(module: nn.Module, names: Collection[str]) -> frozenset[int | str]:
    """Where arguments of these names are given: their positions, and the names."""
    order = enumerate(inspect.signature(module.forward).parameters)
    return frozenset({*names, *(position for position, name in order if name in names)})


def _changed(
    places: frozenset[int | str], change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HookArguments:
    """Arguments, with what `change` makes of the tensors at these places."""

    def changed(place: int | str, value: Any) -> Any:
        return change(value) if place in places and isinstance(value, Tensor) else value

    return tuple(changed(i, value) for i, value in enumerate(args)), {k: changed(k, v) for k, v in kwargs.items()}


def _split_input(
    sequence: SequenceSharding,
    mesh: DeviceMesh,
    places: frozenset[int | str],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> HookArguments | None:
    if not sequence.state_now().tp_sharded:
        return None
    return _changed(places, partial(scatter, dim=1, group=mesh), args, kwargs)


def _gather_input(
    sequence: SequenceSharding,
    mesh: DeviceMesh,
    parts: frozenset[int | str],
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> HookArguments | None:
    state = sequence.state_now()
    if not state.tp_sharded:
        return None

    def whole_of(t: Tensor) -> Tensor:
        flat = t.ndim == 2  # tokens of all rows, one after the other
        part = t if t.is_floating_point() else t.double()  # indices, which that holds as they are
        part = part.unflatten(0, (state.batch, -1)) if flat else part
        whole = gather(part, 1, group=mesh, gather_size=state.local_len).to(t.dtype)
        return whole.flatten(0, 1) if flat else whole

    args, kwargs = _changed(parts, whole_of, args, kwargs)
    x = args[0] if args else next(iter(kwargs.values()))
    length = state.local_len or 0
    if not isinstance(x, Tensor) or not (x.ndim == 3 or (x.ndim == 2 and parts)):
        given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        raise ValueError(
            f"sequence_parallel=True: {type(block).__name__} runs on the whole sequence, and its first argument has "
            f"{given}; it must be hidden states [batch, seq, hidden]. Pass sequence_parallel=False."
        )
    for other in (*args[1:], *kwargs.values()):
        # Of more than one token every part is shorter than the whole: all ranks come to the same answer.
        if other is not x and isinstance(other, Tensor) and other.shape == x.shape and length > 1:
            raise ValueError(
                f"sequence_parallel=True: {type(block).__name__} runs on the whole sequence, and is given two tensors "
                f"{tuple(x.shape)} of a part of it. Pass sequence_parallel=False."
            )
    whole = whole_of(x)
    return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): whole})


def _scatter_output(sequence: SequenceSharding, mesh: DeviceMesh, block: nn.Module, args: Any, output: Any) -> Any:
    state = sequence.state_now()
    if not state.tp_sharded:
        return output
    first = output[0] if isinstance(output, tuple) else output
    length = state.local_len or 0
    if not isinstance(first, Tensor) or not (first.shape[1:2] == (length,) or first.ndim == 2):
        raise ValueError(
            f"sequence_parallel=True: {type(block).__name__} returns {type(first).__name__} "
            f"{tuple(getattr(first, 'shape', ()))}, not hidden states [batch, seq, hidden]. Pass "
            "sequence_parallel=False."
        )

    def own(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if t.ndim == 3 and t.shape[1] == length and t.is_floating_point():  # indices go to the next block, whole
            return scatter(t, 1, group=mesh)
        if t is first:  # tokens of all rows, one after the other
            return scatter(t.unflatten(0, (-1, length)), 1, group=mesh).flatten(0, 1)
        return t

    return tuple(map(own, output)) if isinstance(output, tuple) else own(output)
