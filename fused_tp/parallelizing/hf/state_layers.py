"""Layers of transformers' hybrid models that carry a state from token to token, over context parallel ranks.

A rank holds runs of consecutive tokens, two in the layout that balances causal attention, and causal convolutions,
linear attention and state spaces need the preceding state of each run. All are affine in it, so no rank waits for
another:

| layer               | all-gathered for each run        | state before a run         | contribution to a run    |
|---------------------|----------------------------------|----------------------------|--------------------------|
| convolution, k wide | its last k - 1 inputs (the halo) | the last k - 1 of these    | none: they are inputs    |
| gated delta rule    | its state B [dk, dv], and A, the | S = A S + B, run by run    | (q_t P_t) S, with P_t    |
|                     | product of its transitions       |                            | the product up to t      |
| state space, mamba2 | its state B [p, n], and decay a  | S = a S + B, run by run    | a_t S C_t                |

B is the final state of a run from a zero initial state, computed by transformers' function or the kernel that it has
selected. Communication does not grow with the sequence: dk * (dk + dv), or p * n + 1, fp32 numbers for each run and
head. Computation beyond the layer's own:

- The gated delta rule treats value columns independently. One call with dk more columns, of zero values and the
  identity as initial state, returns A and q_t P_t beside B and the output. It computes dv + dk columns instead of dv.
- A state space adds one product with C; its scan has four products of this size.

Rejected: a contiguous layout that passes the state from rank to rank, where each rank waits for the previous one and
the last computes twice the mean of causal attention; all-to-alls to heads and back, which send every token and need a
number of heads that the ranks divide; transformers' cache classes as the hook, which are asked for a state before A and
B are known.

Not supported: mamba 1 (its kernel takes no initial state, and has no gradient for the final one). Packed documents
(state would leak between them, as it does in transformers' own path).
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

from fused_tp.attention.layout import all_tokens
from fused_tp.ops.collectives import all_gather
from fused_tp.parallelizing.forward_shard import CpContext
from fused_tp.parallelizing.hf.hf_attention import SEQUENCE

Function: TypeAlias = Callable[..., Any]

# Names of the functions to replace, the same in all of transformers' model files.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
DELTA_RULE_BY_CHANNEL = "chunk_kimi_delta_attention"
STATE_SPACE = "mamba2_chunk_scan"
FUSED = "mamba2_split_conv1d_scan_combined"

# By model type: the class of its layers that carry a state, and the functions that it calls besides CONVOLUTION. All
# other layers attend, or compute token by token. To add a model type, compare the forward of the class with those of
# the others, and add the type to docs/model_types.json (see docs/reference/models.md).
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
    """Layers of a transformers model that carry a state and that `pass_states_on` supports: all of them or none."""
    name, calls = STATE_LAYERS.get(model.config.model_type, ("", set()))
    layers = [module for module in model.modules() if type(module).__name__ == name]
    return layers if all(_is_known(layer, {CONVOLUTION, *calls}) for layer in layers) else []


def _is_known(layer: nn.Module, calls: set[str]) -> bool:
    """True if the forward of `layer` is the known one, which depends on the version of transformers."""
    own: Any = inspect.unwrap(type(layer).forward)
    called = called_by(own)
    if "forward" in vars(layer) or called.keys() != calls:  # kernels from the hub are set on the instance
        return False
    return all(OURS[name][1] <= {*inspect.signature(one).parameters} for name, one in called.items())


def called_by(forward: FunctionType) -> dict[str, Function]:
    """Functions that `forward` calls by the names of OURS; not methods of these names."""
    read = {one.argval for one in dis.get_instructions(forward) if one.opname == "LOAD_GLOBAL"}
    found = {name: forward.__globals__.get(name) for name in OURS if name in read}
    return {name: one for name, one in found.items() if callable(one)}


def pass_states_on(layers: Sequence[nn.Module]) -> None:
    """Make `layers` take the state before a rank's tokens from the ranks that hold the preceding tokens.

    Call it before parameters become DTensors: the conversion to plain tensors must enclose this forward.
    """
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _over_ranks(kind)


@cache
def _over_ranks(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass of `kind` whose forward calls OURS in a forward pass that is sharded over context parallel ranks.

    It runs a copy of the forward with other globals. Rejected: writing to the globals of the file, which all models
    made from it read.
    """
    own: Any = inspect.unwrap(kind.forward)
    ours = {name: partial(OURS[name][0], one) for name, one in called_by(own).items()}
    copied = FunctionType(own.__code__, {**own.__globals__, **ours}, own.__name__, own.__defaults__, own.__closure__)
    copied.__kwdefaults__ = own.__kwdefaults__
    over_ranks = torch.compiler.disable(copied)  # torch.compile would look its globals up in the file

    @wraps(kind.forward)  # keeps the signature, which transformers reads
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sequence: Any = getattr(self, SEQUENCE, None)
        cp: CpContext | None = None if sequence is None else sequence.state_now().cp
        if cp is None:
            return kind.forward(self, *args, **kwargs)
        # These forwards pass on unknown keywords, so `cp` reaches OURS, which raise without it.
        return over_ranks(self, *args, cp=cp, **kwargs)

    # Keep the name, by which libraries identify kinds of layers.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


# ---- tokens of each rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive tokens.

    Attributes:
        own: lengths of this rank's runs.
        before: number of runs of all ranks that precede each of these.
        lengths: lengths of all ranks' runs, in the order of the sequence.
        slots: indices of these in the gathered tensors, to which every rank contributes `most` ones.
        most: largest number of runs of a rank.
    """

    own: tuple[int, ...]
    before: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    most: int


@lru_cache(maxsize=16)
def runs_of(seq_len: int, world_size: int, rank: int, layout: str) -> Runs:
    """Runs of `rank`, and of all ranks, in a sequence.

    >>> runs_of(10, 2, 0, "zigzag")
    Runs(own=(3, 2), before=(0, 2), lengths=(3, 5, 2), slots=(0, 2, 1), most=2)
    """
    held = [tokens.ranges for tokens in all_tokens(seq_len, world_size, layout)]
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
    """Gather a tensor for each run of all ranks; return zeros, and the tensors in the order of the sequence.

    The zeros are an empty sum of gathered tensors: they keep the gather in the graph of a rank that uses no other, as
    all ranks must take part in its backward.
    """
    given = [*parts, *[torch.zeros_like(parts[0])] * (runs.most - len(parts))]
    everyone = all_gather(torch.stack(given), 0, group=cp.mesh)
    found = everyone.unbind()
    return everyone[:0].sum(0), [found[slot] for slot in runs.slots]


# ---- replacements of transformers' functions ------------------------------------------------------------------------


def _convolution(
    own: Function, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, *, cp: CpContext, **kwargs: Any
) -> Tensor:
    """Convolve [batch, channels, seq]: each run with its halo before it, all runs in one call."""
    width, runs = weight.shape[-1] - 1, _runs(cp)
    parts = hidden_states.split(runs.own, dim=-1)
    tails = [functional.pad(part, (width, 0))[..., part.shape[-1] :] for part in parts]
    zeros, tails = _from_all(tails, runs, cp)
    # A run may be shorter than a halo, which then holds the ends of several runs.
    ends = [tail[..., width - min(width, length) :] for tail, length in zip(tails, runs.lengths, strict=True)]
    halos = [torch.cat([zeros, *ends[:n]], -1)[..., -width:] for n in runs.before]
    spans = [torch.cat(both, -1) for both in zip(halos, parts, strict=True)]
    out: Tensor = own(torch.cat(spans, -1), weight, bias, **kwargs)
    return torch.cat([span[..., width:] for span in out.split([s.shape[-1] for s in spans], -1)], -1)


def _gated_delta_rule(
    own: Function, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cp: CpContext, **kwargs: Any
) -> tuple[Tensor, None]:
    """Gated delta rule: [batch, seq, heads, dk or dv] -> [batch, seq, heads, dv]; g, beta [batch, seq, heads, ...]."""
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
    """State space on [batch, seq, heads, p], for dt [batch, seq, heads], A [heads], B and C [batch, seq, groups, n]."""
    runs = _runs(cp)
    kwargs |= {"return_final_states": True}
    # Compute steps from dt as the scan does, in fp32 like the kernels: its decays and those here must match.
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
    """Replace a kernel for the whole layer, which takes no state: on None the layer falls back to other functions."""


# By the name of the function to replace, with the parameters that it must have.
OURS: dict[str, tuple[Function, set[str]]] = {
    CONVOLUTION: (_convolution, {"hidden_states", "weight", "bias"}),
    DELTA_RULE: (_gated_delta_rule, {"g", "beta", "initial_state", "output_final_state"}),
    DELTA_RULE_BY_CHANNEL: (_gated_delta_rule, {"g", "beta", "initial_state", "output_final_state"}),
    STATE_SPACE: (_state_space, {"return_final_states", "dt_bias", "dt_softplus", "dt_limit"}),
    FUSED: (_no_fusion, set()),
}
