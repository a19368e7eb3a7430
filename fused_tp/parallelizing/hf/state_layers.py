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

B is the final state of a run that starts from a zero state, computed by transformers' function or by the kernel that it
has selected. Communication does not grow with the sequence: each run and head sends dk * (dk + dv), or p * n + 1, fp32
numbers. The additional computation is small:

- The gated delta rule treats value columns independently. One call with dk more columns, whose values are zero and
  whose initial state is the identity, returns A and q_t P_t in addition to B and the output.
- A state space adds one product with C, where its scan has four products of this size.

Rejected alternatives:

- A contiguous layout that passes the state from rank to rank: each rank waits for the previous one, and the last rank
  computes twice the mean work of causal attention.
- All-to-alls that shard heads instead of tokens: they send every token, and the ranks must divide the number of heads.
- Passing states through transformers' cache classes: the layers read the state before A and B are known.

Not supported: mamba 1 (its kernel accepts no initial state, and has no gradient for the final state), and packed
documents (state would leak between them, as it does in transformers itself).
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

from fused_tp.attention.layout import tokens_by_rank
from fused_tp.ops.collectives import all_gather
from fused_tp.parallelizing.forward_shard import CpContext
from fused_tp.parallelizing.hf.hf_attention import SEQUENCE

Function: TypeAlias = Callable[..., Any]

# Names of the functions to replace. They are the same in all model files of transformers.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
DELTA_RULE_BY_CHANNEL = "chunk_kimi_delta_attention"
STATE_SPACE = "mamba2_chunk_scan"
FUSED = "mamba2_split_conv1d_scan_combined"

# By model type: the name of the layer class that carries a state, and the functions that its forward calls besides
# CONVOLUTION. No other layer of these models carries a state. To add a model type, compare the forward of the class
# with the forwards of the classes here, and add the type to docs/model_types.json (see docs/reference/models.md).
STATE_LAYERS = {
    "bailing_hybrid": ("BailingHybridDeltaAttention", {DELTA_RULE_BY_CHANNEL}),
    "bamba": ("BambaMixer", {STATE_SPACE, FUSED}),
    "falcon_h1": ("FalconH1Mixer", {STATE_SPACE, FUSED}),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", {STATE_SPACE, FUSED}),
    "kimi_linear": ("KimiLinearDeltaAttention", {DELTA_RULE_BY_CHANNEL}),
    "lfm2": ("Lfm2ShortConv", set()),
    "lfm2_moe": ("Lfm2MoeShortConv", set()),
    "lfm3": ("Lfm3ShortConv", set()),
    "mamba2": ("Mamba2Mixer", {STATE_SPACE, FUSED}),
    "nemotron_h": ("NemotronHMamba2Mixer", {STATE_SPACE, FUSED}),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", {DELTA_RULE}),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet", {DELTA_RULE}),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", {DELTA_RULE}),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", {DELTA_RULE}),
    "zamba2": ("Zamba2MambaMixer", {STATE_SPACE, FUSED}),
}


def find_state_layers(model: Any) -> list[nn.Module]:
    """Return the layers of `model` that carry a state; [] if `pass_states_on` does not support all of them."""
    name, calls = STATE_LAYERS.get(model.config.model_type, ("", set()))
    layers = [module for module in model.modules() if type(module).__name__ == name]
    return layers if all(_is_known(layer, {CONVOLUTION, *calls}) for layer in layers) else []


def _is_known(layer: nn.Module, calls: set[str]) -> bool:
    """True if the forward of `layer` calls exactly `calls`, which may change between versions of transformers."""
    own: Any = inspect.unwrap(type(layer).forward)
    called = called_by(own)
    if "forward" in vars(layer) or called.keys() != calls:  # kernels from the hub replace the forward of an instance
        return False
    return all(OURS[name][1] <= {*inspect.signature(one).parameters} for name, one in called.items())


def called_by(forward: FunctionType) -> dict[str, Function]:
    """Return the global functions with names in OURS that `forward` calls. Methods of these names do not count."""
    read = {one.argval for one in dis.get_instructions(forward) if one.opname == "LOAD_GLOBAL"}
    found = {name: forward.__globals__.get(name) for name in OURS if name in read}
    return {name: one for name, one in found.items() if callable(one)}


def pass_states_on(layers: Sequence[nn.Module]) -> None:
    """Make `layers` receive the state before a rank's tokens from the ranks that hold the preceding tokens.

    Call this before parameters become DTensors, because that conversion wraps forward, and must wrap this one too.
    """
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _over_ranks(kind)


@cache
def _over_ranks(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward calls OURS in passes that are sharded over context parallel ranks.

    In such passes it runs a copy of the original forward, in whose globals OURS replace transformers' functions.
    Rejected: writing to the globals of transformers' file, which affects all models of the process.
    """
    own: Any = inspect.unwrap(kind.forward)
    ours = {name: partial(OURS[name][0], one) for name, one in called_by(own).items()}
    copied = FunctionType(own.__code__, {**own.__globals__, **ours}, own.__name__, own.__defaults__, own.__closure__)
    copied.__kwdefaults__ = own.__kwdefaults__
    over_ranks = torch.compiler.disable(copied)  # torch.compile would read the globals of the original file

    @wraps(kind.forward)  # keeps the signature, which transformers reads
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sequence: Any = getattr(self, SEQUENCE, None)
        cp: CpContext | None = None if sequence is None else sequence.state_now().cp
        if cp is None:
            return kind.forward(self, *args, **kwargs)
        # These forwards pass unknown keywords on to the functions, so OURS receive `cp`. Without it they would raise.
        return over_ranks(self, *args, cp=cp, **kwargs)

    # Keep the name of the class, because libraries identify layers by it.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


# ---- tokens of each rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive tokens on one rank, and on all ranks.

    Attributes:
        own: lengths of this rank's runs.
        before: for each of this rank's runs, the number of runs of all ranks that precede it in the sequence.
        lengths: lengths of all ranks' runs, in the order of the sequence.
        slots: for each of all ranks' runs, its index in the gathered tensor, to which every rank contributes `most`
            entries.
        most: largest number of runs of a rank.
    """

    own: tuple[int, ...]
    before: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    most: int


@lru_cache(maxsize=16)
def runs_of(seq_len: int, world_size: int, rank: int, layout: str) -> Runs:
    """Return the runs of `rank`, and of all ranks, in a sequence of `seq_len` tokens.

    >>> runs_of(10, 2, 0, "zigzag")
    Runs(own=(3, 2), before=(0, 2), lengths=(3, 5, 2), slots=(0, 2, 1), most=2)
    """
    held = [tokens.ranges for tokens in tokens_by_rank(seq_len, world_size, layout)]
    most = max(map(len, held))
    found = sorted((r.start, len(r), at, i) for at, ranges in enumerate(held) for i, r in enumerate(ranges))
    return Runs(
        own=tuple(map(len, held[rank])),
        before=tuple(n for n, (_, _, at, _) in enumerate(found) if at == rank),
        lengths=tuple(length for _, length, _, _ in found),
        slots=tuple(at * most + i for _, _, at, i in found),
        most=most,
    )


def _runs(cp: CpContext) -> Runs:
    return runs_of(cp.seq_len, cp.mesh.size(), cp.mesh.get_local_rank(), cp.layout)


def _from_all(parts: list[Tensor], runs: Runs, cp: CpContext) -> tuple[Tensor, list[Tensor]]:
    """Gather one tensor for each run of all ranks. Return (zeros, the tensors in the order of the sequence).

    The zeros are an empty sum of gathered tensors, to be used as the state before the first run. They keep the gather
    in the autograd graph of a rank that uses no other result, because all ranks must run its backward.
    """
    given = [*parts, *[torch.zeros_like(parts[0])] * (runs.most - len(parts))]
    everyone = all_gather(torch.stack(given), 0, group=cp.mesh)
    found = everyone.unbind()
    return everyone[:0].sum(0), [found[slot] for slot in runs.slots]


# ---- replacements of transformers' functions ------------------------------------------------------------------------


def _convolution(
    own: Function, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, *, cp: CpContext, **kwargs: Any
) -> Tensor:
    """Convolve `hidden_states` [batch, channels, seq], each run with its halo in front, all runs in one call."""
    width, runs = weight.shape[-1] - 1, _runs(cp)
    parts = hidden_states.split(runs.own, dim=-1)
    tails = [functional.pad(part, (width, 0))[..., part.shape[-1] :] for part in parts]
    zeros, tails = _from_all(tails, runs, cp)
    # A run may be shorter than a halo, so a halo may hold the ends of several runs.
    ends = [tail[..., width - min(width, length) :] for tail, length in zip(tails, runs.lengths, strict=True)]
    halos = [torch.cat([zeros, *ends[:n]], -1)[..., -width:] for n in runs.before]
    spans = [torch.cat(both, -1) for both in zip(halos, parts, strict=True)]
    out: Tensor = own(torch.cat(spans, -1), weight, bias, **kwargs)
    return torch.cat([span[..., width:] for span in out.split([s.shape[-1] for s in spans], -1)], -1)


def _gated_delta_rule(
    own: Function, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cp: CpContext, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run the gated delta rule: [batch, seq, heads, dk or dv] -> [batch, seq, heads, dv].

    `g` and `beta` are [batch, seq, heads, ...].
    """
    runs, (batch, _, heads, dv), dk = _runs(cp), value.shape, key.shape[-1]
    identity = torch.eye(dk, dtype=torch.float32, device=value.device).expand(batch, heads, dk, dk)
    kwargs |= {"initial_state": functional.pad(identity, (dv, 0)), "output_final_state": True}
    value = functional.pad(value, (0, dk))
    parts = zip(*(x.split(runs.own, dim=1) for x in (query, key, value, g, beta)), strict=True)
    found = [own(q, k, v, g=decay, beta=rate, **kwargs) for q, k, v, decay, rate in parts]
    zeros, finals = _from_all([final for _, final in found], runs, cp)
    states = [zeros[..., :dv]]
    for final in finals[: runs.before[-1]]:
        states.append(final[..., dv:] @ states[-1] + final[..., :dv])
    outs = []
    for n, (out, _) in zip(runs.before, found, strict=True):
        carried = torch.einsum("blhk,bhkv->blhv", out[..., dv:].float(), states[n])
        outs.append((out[..., :dv] + carried).to(out.dtype))
    return torch.cat(outs, 1), None


def _state_space(
    own: Function,
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
    runs = _runs(cp)
    kwargs |= {"return_final_states": True}
    # Compute the steps from dt here, in fp32 like the kernels, so that the scan and the decays below use the same ones.
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    pieces, parts = [], []
    for x, step, b, c in zip(*(t.split(runs.own, dim=1) for t in (hidden_states, steps, B, C)), strict=True):
        out, final = own(x, step, A, b, c, **kwargs)
        decays = (step * A.float()).cumsum(1).exp()
        pieces.append((out, decays, c))
        parts.append(torch.cat([final.float().flatten(2), decays[:, -1].unsqueeze(-1)], -1))
    zeros, finals = _from_all(parts, runs, cp)
    states = [zeros[..., :-1]]
    for packed in finals[: runs.before[-1]]:
        states.append(packed[..., -1:] * states[-1] + packed[..., :-1])
    outs = []
    for n, (out, decays, c) in zip(runs.before, pieces, strict=True):
        batch, _, heads, p = out.shape
        state = states[n].view(batch, c.shape[2], heads // c.shape[2], p, -1)  # heads of a group share one C
        carried = torch.einsum("blgn,bghpn->blghp", c.float(), state).flatten(2, 3) * decays.unsqueeze(-1)
        outs.append((out + carried).to(out.dtype))
    return torch.cat(outs, 1)


def _no_fusion(own: Function, *args: Any, cp: CpContext, **kwargs: Any) -> None:
    """Replace the fused kernel of a layer, which accepts no state. On None, the layer falls back to other functions."""


# By name of the function to replace: the replacement, and the parameters that the original must have.
OURS: dict[str, tuple[Function, set[str]]] = {
    CONVOLUTION: (_convolution, {"hidden_states", "weight", "bias"}),
    DELTA_RULE: (_gated_delta_rule, {"g", "beta", "initial_state", "output_final_state"}),
    DELTA_RULE_BY_CHANNEL: (_gated_delta_rule, {"g", "beta", "initial_state", "output_final_state"}),
    STATE_SPACE: (_state_space, {"return_final_states", "dt_bias", "dt_softplus", "dt_limit"}),
    FUSED: (_no_fusion, set()),
}
