"""Layers of transformers' hybrid models that carry a state from token to token, over context parallel ranks.

A rank holds runs of consecutive tokens (two runs in the layout that balances causal attention). Causal convolutions,
linear attention and state spaces need the state before each run. Their outputs and final states are affine functions
of that state. So each rank computes its runs from a zero state, and adds the contribution of the state before:

| layer               | all-gathered for each run        | state before a run         | contribution to a run    |
|---------------------|----------------------------------|----------------------------|--------------------------|
| convolution, k wide | its last k - 1 inputs (the halo) | the last k - 1 of these    | none: they are inputs    |
| gated delta rule    | its state B [dk, dv], and A, the | S = A S + B, run by run    | (q_t P_t) S, with P_t    |
|                     | product of its transitions       |                            | the product up to t      |
| state space, mamba2 | its state B [p, n], and decay a  | S = a S + B, run by run    | a_t S C_t                |
| state space, mamba  | its state B [d, n], and sum of   | S = e^(A s) S + B, run by  | e^(A s_t) S C_t, with    |
|                     | its steps s [d]                  | run                        | the sum of steps s_t     |

B is the final state of a run that starts from a zero state, computed by transformers' function or by the kernel that it
has selected. Communication does not grow with the sequence: each run and head sends dk * (dk + dv), or p * n + 1, fp32
numbers. The additional computation is small:

- The gated delta rule treats value columns independently. One call with dk more columns, whose values are zero and
  whose initial state is the identity, returns A and q_t P_t in addition to B and the output.
- A state space adds one product with C, where its scan has four products of this size.
- Mamba 1 has a decay for each channel and state, so its final state and the contribution cost as much as two more
  scans in torch. Its kernel has no gradient for the final state, which is therefore computed here, some tokens at a
  time (`_STATE_BLOCK`).

Rejected alternatives:

- A contiguous layout that passes the state from rank to rank: each rank waits for the previous one, and the last rank
  computes twice the mean work of causal attention.
- All-to-alls that shard heads instead of tokens: they send every token, and the ranks must divide the number of heads.
- Passing states through transformers' cache classes: the layers read the state before A and B are known.

Not supported: packed documents (state would leak between them, as it does in transformers itself).
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fused_tp.attention.layout import tokens_by_rank
from fused_tp.ops.collectives import all_gather
from fused_tp.parallelizing.forward_shard import CpContext
from fused_tp.parallelizing.hf.hf_attention import SEQUENCE_ATTRIBUTE

AnyFunction: TypeAlias = Callable[..., Any]

# Names of the functions to replace. They are the same in all model files of transformers.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
DELTA_RULE_BY_CHANNEL = "chunk_kimi_delta_attention"
STATE_SPACE = "mamba2_chunk_scan"
FUSED_SCAN = "mamba2_split_conv1d_scan_combined"
SELECTIVE_SCAN = "mamba_selective_scan"
FUSED_SELECTIVE_SCAN = "mamba_inner_fn"

# By model type: the name of the layer class that carries a state, and the functions that its forward calls besides
# CONVOLUTION. No other layer of these models carries a state. To add a model type, compare the forward of the class
# with the forwards of the classes here, and add the type to docs/model_types.json (see docs/reference/models.md).
STATE_LAYERS = {
    "bailing_hybrid": ("BailingHybridDeltaAttention", {DELTA_RULE_BY_CHANNEL}),
    "bamba": ("BambaMixer", {STATE_SPACE, FUSED_SCAN}),
    "falcon_mamba": ("FalconMambaMixer", {SELECTIVE_SCAN, FUSED_SELECTIVE_SCAN}),
    "falcon_h1": ("FalconH1Mixer", {STATE_SPACE, FUSED_SCAN}),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", {STATE_SPACE, FUSED_SCAN}),
    "jamba": ("JambaMambaMixer", {SELECTIVE_SCAN}),
    "kimi_linear": ("KimiLinearDeltaAttention", {DELTA_RULE_BY_CHANNEL}),
    "lfm2": ("Lfm2ShortConv", set()),
    "lfm2_moe": ("Lfm2MoeShortConv", set()),
    "lfm3": ("Lfm3ShortConv", set()),
    "mamba": ("MambaMixer", {SELECTIVE_SCAN, FUSED_SELECTIVE_SCAN}),
    "mamba2": ("Mamba2Mixer", {STATE_SPACE, FUSED_SCAN}),
    "nemotron_h": ("NemotronHMamba2Mixer", {STATE_SPACE, FUSED_SCAN}),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", {DELTA_RULE}),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet", {DELTA_RULE}),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", {DELTA_RULE}),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", {DELTA_RULE}),
    "zamba2": ("Zamba2MambaMixer", {STATE_SPACE, FUSED_SCAN}),
}


def find_state_layers(model: Any) -> list[nn.Module]:
    """Return the layers of `model` that carry a state; [] if `connect_states` does not support all of them."""
    name, function_names = STATE_LAYERS.get(model.config.model_type, ("", set()))
    layers = [module for module in model.modules() if type(module).__name__ == name]
    return layers if all(_is_supported(layer, {CONVOLUTION, *function_names}) for layer in layers) else []


def _is_supported(layer: nn.Module, function_names: set[str]) -> bool:
    """True if the forward of `layer` calls exactly `function_names`; transformers may change these calls."""
    forward: Any = inspect.unwrap(type(layer).forward)
    called_functions = find_called_functions(forward)
    # The Hugging Face kernels hub replaces `forward` on the instance.
    if "forward" in vars(layer) or called_functions.keys() != function_names:
        return False
    return all(
        REPLACEMENTS[name][1] <= {*inspect.signature(function).parameters}
        for name, function in called_functions.items()
    )


def find_called_functions(forward: FunctionType) -> dict[str, AnyFunction]:
    """Return the global functions with names in REPLACEMENTS that `forward` calls; methods do not count."""
    global_names = {item.argval for item in dis.get_instructions(forward) if item.opname == "LOAD_GLOBAL"}
    values = {name: forward.__globals__.get(name) for name in REPLACEMENTS if name in global_names}
    return {name: item for name, item in values.items() if callable(item)}


def connect_states(layers: Sequence[nn.Module]) -> None:
    """Make `layers` receive the state before a rank's tokens from the ranks that hold the preceding tokens.

    Call this before parameters become DTensors, because that conversion wraps forward, and must wrap this one too.
    """
    for layer in layers:
        layer_class: Any = type(layer)
        layer.__class__ = _subclass_over_ranks(layer_class)


@cache
def _subclass_over_ranks(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `layer_class` whose forward calls REPLACEMENTS if its pass is sharded over the CP ranks.

    In such passes it runs a copy of the original forward, in whose globals REPLACEMENTS replace transformers'
    functions. Rejected: writing to the globals of transformers' file, which affects all models of the process.
    """
    original_forward: Any = inspect.unwrap(layer_class.forward)
    original_functions = find_called_functions(original_forward)

    # Not compiled: torch.compile would read the globals of the original file.
    @torch.compiler.disable
    def run_over_ranks(layer: nn.Module, cp: CpContext, *args: Any, **kwargs: Any) -> Any:
        replacements = {
            name: partial(REPLACEMENTS[name][0], function, cp=cp) for name, function in original_functions.items()
        }
        copied_forward = FunctionType(
            original_forward.__code__,
            {**original_forward.__globals__, **replacements},
            original_forward.__name__,
            original_forward.__defaults__,
            original_forward.__closure__,
        )
        copied_forward.__kwdefaults__ = original_forward.__kwdefaults__
        return copied_forward(layer, *args, **kwargs)

    @wraps(layer_class.forward)  # keeps the signature, which transformers reads
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sequence: Any = getattr(self, SEQUENCE_ATTRIBUTE, None)
        cp: CpContext | None = None if sequence is None else sequence.current_state().cp
        if cp is None:
            return layer_class.forward(self, *args, **kwargs)
        return run_over_ranks(self, cp, *args, **kwargs)

    # Keep the name of the class, because libraries identify layers by it.
    return type(layer_class.__name__, (layer_class,), {"forward": forward, "__module__": layer_class.__module__})


# ---- tokens of each rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenRuns:
    """Runs of consecutive tokens on one rank, and on all ranks.

    Attributes:
        local_lengths: lengths of this rank's runs.
        preceding_counts: for each of this rank's runs, the number of runs of all ranks that precede it in the sequence.
        lengths: lengths of all ranks' runs, in the order of the sequence.
        slots: for each of all ranks' runs, its index in the gathered tensor, to which every rank contributes `max_runs`
            entries.
        max_runs: largest number of runs of a rank.
    """

    local_lengths: tuple[int, ...]
    preceding_counts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    max_runs: int


@lru_cache(maxsize=16)
def find_runs(seq_len: int, world_size: int, rank: int, layout: str) -> TokenRuns:
    """Return the runs of `rank`, and of all ranks, in a sequence of `seq_len` tokens.

    >>> find_runs(10, 2, 0, "zigzag")
    TokenRuns(local_lengths=(3, 2), preceding_counts=(0, 2), lengths=(3, 5, 2), slots=(0, 2, 1), max_runs=2)
    """
    rank_ranges = [tokens.ranges for tokens in tokens_by_rank(seq_len, world_size, layout)]
    max_runs = max(map(len, rank_ranges))
    runs = sorted(
        (r.start, len(r), run_rank, i) for run_rank, ranges in enumerate(rank_ranges) for i, r in enumerate(ranges)
    )
    return TokenRuns(
        local_lengths=tuple(map(len, rank_ranges[rank])),
        preceding_counts=tuple(n for n, (_, _, run_rank, _) in enumerate(runs) if run_rank == rank),
        lengths=tuple(length for _, length, _, _ in runs),
        slots=tuple(run_rank * max_runs + i for _, _, run_rank, i in runs),
        max_runs=max_runs,
    )


def _context_runs(cp: CpContext) -> TokenRuns:
    return find_runs(cp.seq_len, cp.mesh.size(), cp.mesh.get_local_rank(), cp.layout)


def _gather_runs(run_tensors: list[Tensor], runs: TokenRuns, cp: CpContext) -> tuple[Tensor, list[Tensor]]:
    """Gather one tensor for each run of all ranks. Return (zeros, the tensors in the order of the sequence).

    The zeros are an empty sum of gathered tensors, to be used as the state before the first run. They keep the gather
    in the autograd graph of a rank that uses no other result, because all ranks must run its backward.
    """
    padded_tensors = [*run_tensors, *[torch.zeros_like(run_tensors[0])] * (runs.max_runs - len(run_tensors))]
    gathered_tensors = all_gather(torch.stack(padded_tensors), 0, group=cp.mesh)
    slots = gathered_tensors.unbind()
    return gathered_tensors[:0].sum(0), [slots[slot] for slot in runs.slots]


# ---- replacements of transformers' functions ------------------------------------------------------------------------


def _convolve_runs(
    original_function: AnyFunction,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cp: CpContext,
    **kwargs: Any,
) -> Tensor:
    """Convolve `hidden_states` [batch, channels, seq], each run with its halo in front, all runs in one call."""
    halo_width, runs = weight.shape[-1] - 1, _context_runs(cp)
    run_inputs = hidden_states.split(runs.local_lengths, dim=-1)
    tails = [functional.pad(run_input, (halo_width, 0))[..., run_input.shape[-1] :] for run_input in run_inputs]
    zeros, tails = _gather_runs(tails, runs, cp)
    # A run may be shorter than a halo, so a halo may hold the ends of several runs.
    ends = [tail[..., halo_width - min(halo_width, length) :] for tail, length in zip(tails, runs.lengths, strict=True)]
    halos = [torch.cat([zeros, *ends[:n]], -1)[..., -halo_width:] for n in runs.preceding_counts]
    spans = [torch.cat(halo_and_input, -1) for halo_and_input in zip(halos, run_inputs, strict=True)]
    out: Tensor = original_function(torch.cat(spans, -1), weight, bias, **kwargs)
    return torch.cat([span[..., halo_width:] for span in out.split([s.shape[-1] for s in spans], -1)], -1)


def _run_delta_rule(
    original_function: AnyFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cp: CpContext,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run the gated delta rule: [batch, seq, heads, dk or dv] -> [batch, seq, heads, dv].

    `g` and `beta` are [batch, seq, heads, ...].
    """
    runs, (batch, _, num_heads, dv), dk = _context_runs(cp), value.shape, key.shape[-1]
    identity = torch.eye(dk, dtype=torch.float32, device=value.device).expand(batch, num_heads, dk, dk)
    kwargs |= {"initial_state": functional.pad(identity, (dv, 0)), "output_final_state": True}
    value = functional.pad(value, (0, dk))
    run_inputs = zip(*(x.split(runs.local_lengths, dim=1) for x in (query, key, value, g, beta)), strict=True)
    results = [original_function(q, k, v, g=decay, beta=rate, **kwargs) for q, k, v, decay, rate in run_inputs]
    zeros, final_states = _gather_runs([final_state for _, final_state in results], runs, cp)
    states = [zeros[..., :dv]]
    for final_state in final_states[: runs.preceding_counts[-1]]:
        states.append(final_state[..., dv:] @ states[-1] + final_state[..., :dv])
    outs = []
    for n, (out, _) in zip(runs.preceding_counts, results, strict=True):
        carried_output = torch.einsum("blhk,bhkv->blhv", out[..., dv:].float(), states[n])
        outs.append((out[..., :dv] + carried_output).to(out.dtype))
    return torch.cat(outs, 1), None


def _run_state_space(
    original_function: AnyFunction,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    cp: CpContext,
    **kwargs: Any,
) -> Tensor:
    """Run a state space on `hidden_states` [batch, seq, heads, p].

    `dt` is [batch, seq, heads], `A` is [heads], `B` and `C` are [batch, seq, groups, n].
    """
    runs = _context_runs(cp)
    kwargs |= {"return_final_states": True}
    # Compute the steps from dt here, in fp32 like the kernels, so that the scan and the decays below use the same ones.
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    run_results, run_states = [], []
    for x, step, b, c in zip(*(t.split(runs.local_lengths, dim=1) for t in (hidden_states, steps, B, C)), strict=True):
        out, final_state = original_function(x, step, A, b, c, **kwargs)
        decays = (step * A.float()).cumsum(1).exp()
        run_results.append((out, decays, c))
        run_states.append(torch.cat([final_state.float().flatten(2), decays[:, -1].unsqueeze(-1)], -1))
    zeros, final_states = _gather_runs(run_states, runs, cp)
    states = [zeros[..., :-1]]
    for state_and_decay in final_states[: runs.preceding_counts[-1]]:
        states.append(state_and_decay[..., -1:] * states[-1] + state_and_decay[..., :-1])
    outs = []
    for n, (out, decays, c) in zip(runs.preceding_counts, run_results, strict=True):
        batch, _, num_heads, p = out.shape
        state = states[n].view(batch, c.shape[2], num_heads // c.shape[2], p, -1)  # heads of a group share one C
        carried_output = torch.einsum("blgn,bghpn->blghp", c.float(), state).flatten(2, 3) * decays.unsqueeze(-1)
        outs.append((out + carried_output).to(out.dtype))
    return torch.cat(outs, 1)


_STATE_BLOCK = 64  # tokens whose states [batch, channels, tokens, n] are in memory at a time


def _run_selective_scan(
    original_function: AnyFunction,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,  # False without a cache, as in all passes over ranks
    *,
    cp: CpContext,
    **kwargs: Any,
) -> Tensor:
    """Run mamba's state space on `hidden_states` [batch, channels, seq].

    `dt` is like `hidden_states`, `A` is [channels, n], and `B` and `C` are [batch, n, seq].
    """
    runs = _context_runs(cp)
    kwargs |= {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
    steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float().unsqueeze(-1)
    steps = functional.softplus(steps) if delta_softplus else steps
    run_results, run_states = [], []
    run_inputs = (t.split(runs.local_lengths, dim=-1) for t in (hidden_states, dt, steps, B, C))
    for x, run_dt, step, b, c in zip(*run_inputs, strict=True):
        out = original_function(x, run_dt, A, b, c, **kwargs)  # without the gate z, which also applies to the carry
        step_sums = step.cumsum(-1)
        run_results.append((out, step_sums, c))
        final_state = _final_state(x, step, step_sums, A, b)
        run_states.append(torch.cat([final_state, step_sums[..., -1:]], -1))
    zeros, final_states = _gather_runs(run_states, runs, cp)
    states = [zeros[..., :-1]]
    for state_and_steps in final_states[: runs.preceding_counts[-1]]:
        states.append((A * state_and_steps[..., -1:]).exp() * states[-1] + state_and_steps[..., :-1])
    outs = []
    for n, (out, step_sums, c) in zip(runs.preceding_counts, run_results, strict=True):
        outs.append((out + _carried_output(step_sums, A, c, states[n])).to(out.dtype))
    result = torch.cat(outs, -1)
    return result if z is None else result * functional.silu(z)


def _final_state(x: Tensor, step: Tensor, step_sums: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """Return the state [batch, channels, n] after a run that starts from a zero state."""

    def sum_block(x: Tensor, step: Tensor, steps_after: Tensor, b: Tensor) -> Tensor:
        decays = (A.unsqueeze(1) * steps_after.unsqueeze(-1)).exp()  # [batch, channels, tokens, n]
        return torch.einsum("bdl,bnl,bdln->bdn", (step * x.float()), b.float(), decays)

    blocks = zip(*(t.split(_STATE_BLOCK, -1) for t in (x, step, step_sums[..., -1:] - step_sums, b)), strict=True)
    terms = [checkpoint(sum_block, *block, use_reentrant=False) for block in blocks]
    return torch.stack(terms).sum(0)


def _carried_output(step_sums: Tensor, A: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Return the contribution [batch, channels, seq] of the `state` [batch, channels, n] before a run."""

    def contribution(step_sums: Tensor, c: Tensor, state: Tensor) -> Tensor:
        decays = (A.unsqueeze(1) * step_sums.unsqueeze(-1)).exp()
        return torch.einsum("bdln,bnl,bdn->bdl", decays, c.float(), state)

    blocks = zip(step_sums.split(_STATE_BLOCK, -1), c.split(_STATE_BLOCK, -1), strict=True)
    return torch.cat([checkpoint(contribution, *block, state, use_reentrant=False) for block in blocks], -1)


def _skip_fused_scan(original_function: AnyFunction, *args: Any, cp: CpContext, **kwargs: Any) -> None:
    """Replace the fused kernel of a layer, which accepts no state. On None, the layer falls back to other functions."""


# By name of the function to replace: the replacement, and the parameters that the original must have.
REPLACEMENTS: dict[str, tuple[AnyFunction, set[str]]] = {
    CONVOLUTION: (_convolve_runs, {"hidden_states", "weight", "bias"}),
    DELTA_RULE: (_run_delta_rule, {"g", "beta", "initial_state", "output_final_state"}),
    DELTA_RULE_BY_CHANNEL: (_run_delta_rule, {"g", "beta", "initial_state", "output_final_state"}),
    STATE_SPACE: (_run_state_space, {"return_final_states", "dt_bias", "dt_softplus", "dt_limit"}),
    FUSED_SCAN: (_skip_fused_scan, set()),
    SELECTIVE_SCAN: (_run_selective_scan, {"D", "z", "delta_bias", "delta_softplus", "return_last_state"}),
    FUSED_SELECTIVE_SCAN: (_skip_fused_scan, set()),
}
