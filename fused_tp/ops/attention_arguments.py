"""Arguments shared by all ops of context parallel attention, and their checks.

Plans depend on the values of cu_seqlens, which the host must read. Public functions only move the tensor to the CPU
(`move_to_cpu`), so that torch.compile can trace them. The op reads the values, because it runs on real tensors only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from fused_tp.attention.layout import check_layout, local_length
from fused_tp.attention.spec import UNLIMITED, AttentionArguments, AttentionMask
from fused_tp.core.errors import RankMismatchError
from fused_tp.core.pending import checksum
from fused_tp.ops.arguments import (
    check_bool,
    check_device,
    check_int,
    check_integers,
    check_like,
    check_tensor,
    checked_number,
    is_int,
)

if TYPE_CHECKING:
    from typing_extensions import Required


class ScoreKeywords(TypedDict, total=False):
    """Keywords for scores and masks that training and decoding share, for type checkers; see `ring_attention`."""

    causal: bool
    scale: float | None
    window: tuple[int, int] | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class AttentionKeywords(ScoreKeywords, total=False):
    """Keywords of attention over a sharded sequence."""

    layout: str
    dropout_p: float
    cu_seqlens: Tensor | None
    cu_seqlens_kv: Tensor | None
    seq_len: int | None
    seq_len_kv: int | None


A = TypeVar("A", bound=Any)
F = TypeVar("F", bound=Callable[..., Any])


# Keywords for the overloads of public functions: with return_lse=True they return (out, lse), otherwise out.
class OutKeywords(AttentionKeywords, total=False):
    return_lse: Literal[False]


class OutAndLseKeywords(AttentionKeywords, total=False):
    return_lse: Required[Literal[True]]


class ScoreOutKeywords(ScoreKeywords, total=False):
    return_lse: Literal[False]


class ScoreOutAndLseKeywords(ScoreKeywords, total=False):
    return_lse: Required[Literal[True]]


def with_keywords(keywords: Any, arguments: type[Any] = AttentionArguments) -> Callable[[F], F]:
    """Decorate a function so that `inspect.signature` and `help` list its `**keywords` by name.

    The names are the fields of the TypedDict `keywords`, and the defaults are taken from the NamedTuple `arguments`.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *positional_parameters, _ = signature.parameters.values()
        keyword_parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=arguments._field_defaults[name],
                annotation=annotation.__forward_arg__,
            )
            for name, annotation in keywords.__annotations__.items()
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*positional_parameters, *keyword_parameters])
        return function

    return decorate


# Evaluated at import, because torch.compile cannot trace access to __annotations__.
_ATTENTION_KEYWORDS = frozenset(AttentionKeywords.__annotations__)
SCORE_KEYWORDS = frozenset(ScoreKeywords.__annotations__)


def check_keywords(op: str, keywords: Mapping[str, Any], known_names: frozenset[str]) -> None:
    """Raise TypeError for keywords that the public function `op` does not accept."""
    for name in keywords:
        if name not in known_names:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")


def build_arguments(op: str, keywords: Mapping[str, Any], **internal_arguments: Any) -> AttentionArguments:
    """Build the arguments after q, k and v from the keywords of the public function `op`; checks `dropout_p` only."""
    check_keywords(op, keywords, _ATTENTION_KEYWORDS)
    dropout_p = keywords.get("dropout_p", 0.0)
    if dropout_p != 0.0 or type(dropout_p) is not float:
        dropout_p = checked_number("dropout_p", dropout_p, _is_valid_dropout, "in [0, 1)")
    # The seed is drawn from the CPU generator for tensors on any device, so that reading it does not synchronize the
    # host. It is drawn before the other checks, so that a rejected call advances the generator like any other call.
    seed = torch.randint(2**63 - 1, (1,), device="cpu") if dropout_p else None
    return AttentionArguments(**{**keywords, **internal_arguments, "seed": seed})


def _is_valid_dropout(p: float) -> bool:
    return 0 <= p < 1


def checked_arguments(
    arguments: AttentionArguments, q: Any, k: Any, v: Any, size: int, rank: int
) -> AttentionArguments:
    """Check `arguments` and fill in its missing fields, for rank `rank` of the `size` ranks that share the sequence.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    check_qkv(q, k, v)
    check_bool(causal=arguments.causal)
    bounds, bounds_kv = (
        move_to_cpu("cu_seqlens", arguments.cu_seqlens),
        move_to_cpu("cu_seqlens_kv", arguments.cu_seqlens_kv),
    )
    layout, seq_len_kv = arguments.layout, cast("int | None", arguments.seq_len_kv)
    check_layout(layout, has_documents=bounds is not None)
    if bounds is None and bounds_kv is not None:
        raise ValueError("cu_seqlens_kv was passed without cu_seqlens; pass cu_seqlens, the documents of the queries.")
    if seq_len_kv is None and bounds_kv is None and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"k has {k.shape[1]} tokens on rank {rank}, but q has {q.shape[1]} (dim 1 of [batch, seq_local, heads, "
            "head_dim]). Each rank must hold the queries and keys of the same tokens. For cross-attention, pass "
            "seq_len_kv, the total length of the keys."
        )
    total = total_kv = total_length("seq_len", arguments.seq_len, "q", q.shape[1], size, rank, layout)
    if seq_len_kv is not None or k.shape[1] != q.shape[1]:
        total_kv = total_length("seq_len_kv", seq_len_kv, "k", k.shape[1], size, rank, layout)
    for name, length in (("q", total), ("k", total_kv)):
        if length >= 2**31:
            raise ValueError(f"{name} has {length} tokens over all ranks; at most 2**31 - 1 are supported.")
    return checked_score_arguments(arguments, q)._replace(
        cu_seqlens=bounds,
        cu_seqlens_kv=bounds_kv,
        dropout_p=float(arguments.dropout_p),
        joined=1,
        seq_len=total,
        seq_len_kv=total_kv,
    )


def checked_score_arguments(arguments: A, q: Tensor) -> A:
    """Check the ScoreKeywords except `causal` in the NamedTuple `arguments`; return it with defaults filled in."""
    for name in ("alibi_slopes", "sinks"):
        check_per_head(name, getattr(arguments, name), q)
    scale = arguments.scale
    if scale is not None:
        scale = checked_number("scale", scale, isfinite, "finite", "a float or None")
    result: A = arguments._replace(
        window=list(checked_window(arguments.window)),
        scale=float(q.shape[3]) ** -0.5 if scale is None else scale,
        softcap=checked_softcap(arguments.softcap),
    )
    return result


def describe_call(arguments: AttentionArguments, mask: AttentionMask, **flags: bool) -> str:
    """Return a text of all arguments, besides shapes, that must be equal on all ranks, and of `flags`.

    Ranks compare the checksum of this text, not the values, because shared memory calls compare at most eight numbers.
    """
    bounds = mask.cu_seqlens, mask.cu_seqlens_kv
    documents = f"checksum {checksum(repr(bounds))}" if any(bounds) else "one length"
    return ", ".join(
        [str(arguments), *(f"{name}={value}" for name, value in flags.items()), f"documents of {documents}"]
    )


@contextmanager
def annotate_mismatch(op: str, rank: int, description: str) -> Iterator[None]:
    """Context manager that adds `description`, the text whose checksum was compared, to a RankMismatchError."""
    try:
        yield
    except RankMismatchError as error:
        raise RankMismatchError(
            f"{str(error).rstrip('.')}. The last number of a {op} is a checksum of its arguments; on rank {rank} the "
            f"arguments are {description}. Pass the same arguments on all ranks. If ranks hold different numbers of "
            "tokens, pass seq_len, the length of the full sequence."
        ) from error


def move_to_cpu(name: str, cu_seqlens: Any) -> Tensor | None:
    """Return `cu_seqlens` on the CPU, or None for None. A copy from a GPU synchronizes with it.

    Raises:
        TypeError, ValueError: `cu_seqlens` is not a 1-D tensor of int32 or int64.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"{name} must be a Tensor, not {type(cu_seqlens).__name__}; pass torch.tensor([0, ..., seq_len]), the "
            "start of each document and the end of the last one."
        )
    check_integers(name, cu_seqlens)
    if cu_seqlens.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(cu_seqlens.shape)}; it must be [documents + 1].")
    return cu_seqlens.cpu()


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Raise TypeError or ValueError unless the dtypes, devices and shapes of q, k and v are compatible."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if isinstance(t, Tensor) and t.is_nested:
            raise TypeError(f"{name} is a nested tensor; pack the documents into one sequence and pass cu_seqlens.")
    check_dtypes(q, k, v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be [batch, seq_local, heads, head_dim].")
        if 0 in (t.shape[0], *t.shape[2:]):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; only seq_local may be 0.")
    check_shapes(q, k, v)


def check_dtypes(q: Any, k: Any, v: Any, suffix: str = "") -> None:
    """Check that q, k and v share dtype and device; `suffix` is appended to the names of k and v."""
    check_tensor("q", q)
    check_like(f"k{suffix}", k, "q", q)
    check_like(f"v{suffix}", v, "q", q)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, suffix: str = "", *, compares_batch: bool = True) -> None:
    """Check that heads, head_dim and, if `compares_batch`, the batch sizes of q, k and v are compatible.

    `suffix` is appended to the names of k and v in errors.
    """
    if compares_batch and k.shape[0] != q.shape[0]:
        raise ValueError(f"k{suffix} has a batch of {k.shape[0]}, but q has {q.shape[0]}; they must be equal.")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k{suffix} has head_dim {k.shape[3]}, but q has {q.shape[3]}; they must be equal.")
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"q has {q.shape[2]} heads; their number must be a multiple of the {k.shape[2]} heads of k{suffix}."
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v{suffix} has shape {tuple(v.shape)}, but k{suffix} {tuple(k.shape)}; only head_dim may differ."
        )


def total_length(name: str, total: Any, tensor_name: str, length: int, size: int, rank: int, layout: str) -> int:
    """Return the number of tokens over all ranks.

    `total` is the number that the caller passed; it is checked. None: every rank holds `length` tokens, as this rank
    does. `tensor_name` is the tensor's name in messages.
    """
    if total is None:
        return length * size
    check_int(name, total, minimum=0)
    expected = local_length(total, size, rank, layout)
    if expected != length:
        raise ValueError(
            f"{name}={total} in layout {layout!r} assigns {expected} tokens to rank {rank} of {size}, but "
            f"{tensor_name} holds "
            f"{length}; shard tensors with shard_sequence and the same layout."
        )
    return int(total)


def checked_softcap(softcap: Any) -> float:
    requirement = "finite and positive, or 0.0 for no cap"
    return checked_number("softcap", softcap, _is_valid_softcap, requirement)


def _is_valid_softcap(x: float) -> bool:
    return 0 <= x < inf


def checked_window(window: Any) -> tuple[int, int]:
    if window is None:
        return UNLIMITED, UNLIMITED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be (left, right), the numbers of keys seen on each side, not {window!r}.")
    if not all(map(is_int, window)):
        raise TypeError(f"window is {tuple(window)}; each side must be an int, or -1 for no limit.")
    for side in window:
        check_int("window", side)  # must fit in 64 bits
    if min(window) < UNLIMITED:
        raise ValueError(f"window is {tuple(window)}; each side must be at least 0, or -1 for no limit.")
    left, right = window
    return int(left), int(right)


def check_per_head(name: str, value: Any, q: Tensor) -> None:
    if value is None:
        return
    check_tensor(name, value, min_dims=0)
    if tuple(value.shape) != (q.shape[2],):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be [{q.shape[2]}], one for each head of q.")
    check_device(name, value, "q", q)
