"""Blocks of a sequence parallel model that run on the full sequence: state spaces, latent attention, unknown experts.

Between layers a rank has a shard of the tokens. A block that does not support a shard, or is not known to, gets
the tokens of all ranks and returns this rank's. Inside, it runs as if there were no sequence parallelism:

| tensors             | forward                    | backward                                                        |
|---------------------|----------------------------|-----------------------------------------------------------------|
| input [b, s / W, n] | gathered along dim 1       | own shard: the block's gradient is the same on all ranks        |
| layers inside       | unchanged                  | unchanged                                                       |
| output [b, s, n]    | own shard                  | gathered                                                        |

A block is a module that a layer of the model calls: a direct child of the elements of an nn.ModuleList.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from fused_tp.nn.float8 import is_float8_linear
from fused_tp.ops.collectives import gather, scatter
from fused_tp.parallelizing.experts import takes_routing
from fused_tp.parallelizing.layers import HookArguments, attachments
from fused_tp.parallelizing.sequence_sharding import SequenceSharding, restore_hook_order
from fused_tp.parallelizing.shard_plan import ShardingPlan, is_within, spec_of


def mixes_tokens(module: nn.Module) -> bool:
    """True if `module` is a layer of torch whose output at a token depends on other tokens."""
    if isinstance(module, nn.modules.conv._ConvNd):
        # A stride drops tokens, and padding adds some: both depend on where a shard begins.
        padding = () if isinstance(module.padding, str) else module.padding  # "same" adds none if the size is 1
        return any(size > 1 for size in (*module.kernel_size, *module.stride)) or any(padding)
    return isinstance(module, (nn.RNNBase, nn.modules.batchnorm._NormBase))


def find_blocks(model: nn.Module, plan: ShardingPlan, *, exchanges_expert_rows: bool) -> tuple[list[str], list[str]]:
    """Return (names of blocks that run on the full sequence, names of blocks with experts that run on a shard).

    Args:
        exchanges_expert_rows: experts are distributed over ranks outside the tensor parallel group, so that each
            tensor parallel rank sends the rows of all tokens to those ranks.

    Raises:
        ValueError: a module needs the full sequence, or may need it, but is in no block; or the plan has a
            `ParallelStyle`.
    """
    modules = dict(model.named_modules())
    blocks: dict[str, None] = {}
    for name, module in modules.items():
        style = plan.modules.get(name)
        # These modules see the full sequence anyway.
        if any(
            is_within(name, outside_name) for outside_name in (*plan.modules_before_layers, *plan.modules_after_layers)
        ):
            continue
        if isinstance(style, ParallelStyle):
            raise ValueError(
                f"{name!r} has a ParallelStyle in the plan, which is not supported with sequence_parallel=True: it "
                "does not specify how the sequence is sharded. Use the name of a style, such as 'colwise'."
            )
        spec = spec_of(style)
        has_parameters = any(True for _ in module.parameters(recurse=False))
        is_known = (
            style is not None
            or "norm" in type(module).__name__.lower()
            or isinstance(module, nn.Embedding)
            or (isinstance(module, nn.modules.conv._ConvNd) and not mixes_tokens(module))
        )
        needs_sequence = spec.splits_input or spec.shares_rotary or spec.shares_output or spec.sums_output
        if not needs_sequence and (is_known or not has_parameters):
            continue
        block = _find_block(name, modules)
        if block is None and style is not None:
            raise ValueError(
                f"sequence_parallel=True does not support the style {style!r} of {name!r}: it needs the full sequence, "
                "which can be gathered only inside a layer of an nn.ModuleList. Pass sequence_parallel=False."
            )
        if block is None:
            raise ValueError(
                f"sequence_parallel=True: {name!r} ({type(module).__name__}) has parameters but is not in the plan, so "
                "it is unknown whether it supports a shard of the sequence. Add it to the plan with a style, or pass "
                "sequence_parallel=False."
            )
        # A replicated nn.Linear that is itself a block treats tokens independently, so it runs on a shard.
        if not (block == name and (type(module) is nn.Linear or is_float8_linear(module)) and style is None):
            blocks[block] = None
    shard_blocks = (
        []
        if exchanges_expert_rows
        else [block for block in blocks if _treats_tokens_independently(block, modules[block], plan)]
    )
    return [block for block in blocks if block not in shard_blocks], shard_blocks


_OUTPUT_RECORDER_MODULE = "transformers.utils.output_capturing"  # module of hooks that store outputs
_KNOWN_MODULES = (
    "transformers.models.",
    "transformers.activations",
    "torch.nn.modules.linear",
    "torch.nn.modules.activation",
)


def _treats_tokens_independently(name: str, block: nn.Module, plan: ShardingPlan) -> bool:
    """True if `block` has experts and treats tokens independently.

    Inspecting a module cannot prove this. So it is assumed only for unmodified code of transformers, which has been
    reviewed, and whose outputs are compared with the unsharded model for each model type
    (tests/integrations/sweep.py). These blocks run on the full sequence instead:

    - a block that is, or contains, a module of a class outside transformers' models and torch's linear layers and
      activations; or that has a patched forward or hooks, which may read all tokens;
    - a block that draws random noise for tokens or their scores: ranks would draw different amounts of random numbers,
      so all later draws would differ between them;
    - a block with arguments besides hidden states, which would have to be sharded like these;
    - a block without experts that take routing, or with a layer of a style other than plain column or row.
    """
    expert_names = []
    for path, module in block.named_modules(prefix=name):
        spec = spec_of(plan.modules.get(path))
        if spec.sums_output:
            expert_names.append(path)
            is_supported = takes_routing(module)
        else:
            is_supported = not (spec.splits_input or spec.gathers_output or spec.shares_rotary or spec.shares_keys)
            is_supported &= not spec.adds_once and not plan.parameters_of(path, module)
        is_known = type(module).__module__.startswith(_KNOWN_MODULES)
        if not (is_supported and is_known and not _may_read_tokens(module) and not _draws_noise(module)):
            return False
    parameters = inspect.signature(type(block).forward).parameters.values()
    expected_kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2  # of self, and of the hidden states
    takes_hidden_states_only = [p.kind for p in parameters] == expected_kinds
    return bool(expert_names) and takes_hidden_states_only


def _may_read_tokens(module: nn.Module) -> bool:
    """True if `module` has a patched forward or hooks, except transformers' recorders, which only store outputs."""
    has_only_recorders = all(
        getattr(hook, "__module__", "") == _OUTPUT_RECORDER_MODULE for hook in module._forward_hooks.values()
    )
    return bool(set(attachments(module)) - ({"_forward_hooks"} if has_only_recorders else set()))


def _draws_noise(module: nn.Module) -> bool:
    """True if `module` draws noise in training: transformers' routers have a "jitter" attribute with its amount."""
    return any("jitter" in name and value for name, value in vars(module).items())


def _find_block(name: str, modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the block that the module called `name` is, or is inside; None if it is in no block."""
    components = name.split(".")
    for n in range(1, len(components) - 1):
        if isinstance(modules[".".join(components[:n])], nn.ModuleList):
            prefix_lengths = range(n + 2, len(components) + 1)
            names = (".".join(components[:m]) for m in prefix_lengths)
            return next((candidate for candidate in names if not isinstance(modules[candidate], nn.ModuleList)), None)
    return None


def run_on_full_sequence(
    block: nn.Module, mesh: DeviceMesh, sequence: SequenceSharding, *, sharded_arguments: Collection[str] = ()
) -> None:
    """Hook `block`, whose layers run without sequence parallelism, to run on the full sequence.

    `sharded_arguments` names the arguments, besides the first, that hold a shard of the sequence.
    """
    # Prepend, because the hooks that styles have registered expect full sequences.
    gather_input = partial(_gather_input, sequence, mesh, _argument_keys(block, sharded_arguments))
    block.register_forward_pre_hook(gather_input, with_kwargs=True, prepend=True)
    restore_hook_order(block._forward_pre_hooks)
    block.register_forward_hook(partial(_scatter_output, sequence, mesh))


def split_arguments_before(
    module: nn.Module, arguments: Collection[str], mesh: DeviceMesh, sequence: SequenceSharding
) -> None:
    """Hook `module` so that it receives its `arguments`, which hold the tokens of all ranks, sharded to this rank's."""
    split_input = partial(_split_input, sequence, mesh, _argument_keys(module, arguments))
    module.register_forward_pre_hook(split_input, with_kwargs=True)


def gather_output_after(module: nn.Module, mesh: DeviceMesh, sequence: SequenceSharding) -> None:
    """Hook `module`, which runs on this rank's tokens, so that its output is gathered to the tokens of all ranks."""
    module.register_forward_hook(partial(_gather_output, sequence, mesh))


def _gather_output(
    sequence: SequenceSharding, mesh: DeviceMesh, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    state = sequence.current_state()
    return gather(output, 1, group=mesh, gather_size=state.local_len) if state.is_tp_sharded else output


def _argument_keys(module: nn.Module, names: Collection[str]) -> frozenset[int | str]:
    """Return the names and the positional indices by which the arguments called `names` can be passed."""
    numbered_names = enumerate(inspect.signature(module.forward).parameters)
    return frozenset({*names, *(index for index, name in numbered_names if name in names)})


def _replace_arguments(
    argument_keys: frozenset[int | str],
    transform: Callable[[Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> HookArguments:
    """Return `args` and `kwargs` with `transform` applied to the tensors at `argument_keys` (indices and names)."""

    def replace_argument(key: int | str, value: Any) -> Any:
        return transform(value) if key in argument_keys and isinstance(value, Tensor) else value

    return tuple(replace_argument(i, value) for i, value in enumerate(args)), {
        k: replace_argument(k, v) for k, v in kwargs.items()
    }


def _split_input(
    sequence: SequenceSharding,
    mesh: DeviceMesh,
    argument_keys: frozenset[int | str],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> HookArguments | None:
    if not sequence.current_state().is_tp_sharded:
        return None
    return _replace_arguments(argument_keys, partial(scatter, dim=1, group=mesh), args, kwargs)


def _gather_input(
    sequence: SequenceSharding,
    mesh: DeviceMesh,
    argument_keys: frozenset[int | str],
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> HookArguments | None:
    state = sequence.current_state()
    if not state.is_tp_sharded:
        return None

    def gather_full(t: Tensor) -> Tensor:
        is_flat = t.ndim == 2  # the tokens of all rows in one dim
        shard = t if t.is_floating_point() else t.double()  # gather needs floats; float64 holds indices exactly
        shard = shard.unflatten(0, (state.batch_size, -1)) if is_flat else shard
        full_input = gather(shard, 1, group=mesh, gather_size=state.local_len).to(t.dtype)
        return full_input.flatten(0, 1) if is_flat else full_input

    args, kwargs = _replace_arguments(argument_keys, gather_full, args, kwargs)
    x = args[0] if args else next(iter(kwargs.values()))
    length = state.local_len or 0
    if not isinstance(x, Tensor) or not (x.ndim == 3 or (x.ndim == 2 and argument_keys)):
        description = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        raise ValueError(
            f"sequence_parallel=True: the first argument of {type(block).__name__}, which runs on the full sequence, "
            f"must be hidden states [batch, seq, hidden], got {description}. Pass sequence_parallel=False."
        )
    for argument in (*args[1:], *kwargs.values()):
        # A tensor of the shape of x is another shard, not the full sequence: with more than one token the two differ in
        # length on every rank. So all ranks raise, or none.
        if argument is not x and isinstance(argument, Tensor) and argument.shape == x.shape and length > 1:
            raise ValueError(
                f"sequence_parallel=True: {type(block).__name__} runs on the full sequence, but two of its arguments "
                f"hold shards of it, {tuple(x.shape)}, which is not supported. Pass sequence_parallel=False."
            )
    full_input = gather_full(x)
    return ((full_input, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): full_input})


def _scatter_output(sequence: SequenceSharding, mesh: DeviceMesh, block: nn.Module, args: Any, output: Any) -> Any:
    state = sequence.current_state()
    if not state.is_tp_sharded:
        return output
    first_output = output[0] if isinstance(output, tuple) else output
    length = state.local_len or 0
    if not isinstance(first_output, Tensor) or not (first_output.shape[1:2] == (length,) or first_output.ndim == 2):
        raise ValueError(
            f"sequence_parallel=True: {type(block).__name__} must return hidden states [batch, seq, hidden], got "
            f"{type(first_output).__name__} {tuple(getattr(first_output, 'shape', ()))}. Pass sequence_parallel=False."
        )

    def take_shard(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        # Indices are not sharded: the next block gets those of the full sequence.
        if t.ndim == 3 and t.shape[1] == length and t.is_floating_point():
            return scatter(t, 1, group=mesh)
        if t is first_output:  # has the tokens of all rows in one dim
            return scatter(t.unflatten(0, (-1, length)), 1, group=mesh).flatten(0, 1)
        return t

    return tuple(map(take_shard, output)) if isinstance(output, tuple) else take_shard(output)
