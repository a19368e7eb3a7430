"""Key/value caches of one rank, and of a group whose ranks each hold some of the tokens of every sequence."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from fused_tp.attention.cache import scatter_new_tokens
from fused_tp.attention.decode import equal_length_runs
from fused_tp.attention.layout import DEFAULT_BLOCK, BlockCyclicLayout, all_tokens, check_layout
from fused_tp.core.group import GroupLike, group_identity, resolve_group
from fused_tp.nn.linear import check_positive
from fused_tp.ops.arguments import autocast_dtype, cast, check_int, check_local, check_tensor
from fused_tp.ops.attention_arguments import (
    SCORE_KEYWORDS,
    ScoreKeywords,
    ScoreOutAndLseKeywords,
    ScoreOutKeywords,
    check_keywords,
    total_length,
)
from fused_tp.ops.context_parallel_decode import DecodeArguments, decode

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KVCache:
    """One attention layer's keys and values on this rank, [batch, length, kv_heads / W, head_dim].

    Args:
        max_length: allocate space for this many tokens at once, which never moves (static); None: grow by doubling, so
            that a token takes constant time on average.

    Raises:
        ValueError: more tokens than `max_length`; keys and values that do not match each other or the cache; use while
            autograd records.

    Example:
        >>> cache = KVCache(max_length=2048)
        >>> with torch.no_grad():
        ...     y = attention(prompt, kv_cache=cache)           # [1, 100, hidden]
        ...     y = attention(next_token, kv_cache=cache)       # [1, 1, hidden], sees 101 tokens
    """

    def __init__(self, max_length: int | None = None) -> None:
        self.length = 0
        self._rows = _DenseCache("KVCache", max_length)

    @property
    def max_length(self) -> int | None:
        """The `max_length` of the constructor."""
        return self._rows.max_length

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [batch, new, heads, head_dim]; return views of all keys and values, oldest first."""
        k, v = _checked(k, v)
        start, stop = self.length, self.length + k.shape[1]
        keys, values = self._rows.reserve(k, v, start, stop)
        keys[:, start:stop] = k
        values[:, start:stop] = v
        self.length = stop
        return keys[:, :stop], values[:, :stop]

    def reset(self) -> None:
        """Remove all tokens; the memory is kept for the next sequences of a batch of the same size."""
        self.length = 0


class _DenseCache:
    """Keys and values [batch, capacity, heads, dim] that grow by doubling."""

    def __init__(self, owner: str, max_length: int | None, count: Callable[[int], int] = int) -> None:
        """`count`: maps a number of tokens to the number of this rank's rows."""
        if max_length is not None:
            check_positive("max_length", max_length)
        self.owner, self.max_length, self.count = owner, max_length, count
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def reserve(self, k: Tensor, v: Tensor, length: int, needed: int) -> tuple[Tensor, Tensor]:
        """Return keys and values with space for `needed` tokens; the first `length` tokens are kept."""
        if self.max_length is not None and needed > self.max_length:
            raise ValueError(
                f"the {self.owner} has room for max_length={self.max_length} tokens of a sequence and {needed} are "
                "needed; make it longer, or leave max_length out to let it grow."
            )
        used, wanted = self.count(length), self.count(needed)
        rows = max(wanted, 2 * used, 16) if self.max_length is None else self.count(self.max_length)
        for name, new in (("keys", k), ("values", v)):
            held: Tensor | None = getattr(self, name)
            if held is not None:
                ours, theirs = ((x.shape[0], *x.shape[2:], x.dtype, x.device) for x in (held, new))
                if ours != theirs and length > 0:
                    raise ValueError(
                        f"the {self.owner} holds {name} of (batch, kv_heads, head_dim, dtype, device) = {ours} and "
                        f"got {theirs}; reset() it before another batch."
                    )
                if ours == theirs and wanted <= held.shape[1]:
                    continue
            room = new.new_empty((new.shape[0], rows, *new.shape[2:]))
            if held is not None and length > 0:
                room[:, :used] = held[:, :used]
            setattr(self, name, room)
        return _not_empty(self.keys, self.values)


class ContextCache(ABC):
    """Base of caches over a group. `group`: the ranks; `block`: as in `context_parallel_decode`.

    Holds one attention layer's keys and values of a batch of sequences. In every forward pass `append` the new tokens,
    then `attend` with their queries, in this order on all ranks of the group. For inference only: the cache is written
    in place, which autograd cannot follow.
    """

    def __init__(self, group: GroupLike, block: int) -> None:
        check_positive("block", block)
        self.group = group
        self.block = block
        _, size, rank = group_identity(group)
        self._layout = BlockCyclicLayout(size, rank, block)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sequence over all ranks; [] before the first append."""
        return list(self._lengths())

    @property
    def length(self) -> int:
        """Length of the longest sequence."""
        return max(self._lengths(), default=0)

    def positions(self, new: int, new_lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Positions of the next `new` tokens: int64 [new] if all sequences are equally long and `new_lengths` is None,
        else [batch, new] with 0 for padding."""
        lengths, added = self._lengths(), _as_list(new_lengths)
        if len(set(lengths)) <= 1 and added is None:
            start = lengths[0] if lengths else 0
            return torch.arange(start, start + new, device="cpu")
        added = [new] * len(lengths) if added is None else added
        lengths = lengths or [0] * len(added)
        stops = _on_host(length + n for length, n in zip(lengths, added, strict=True))
        return (stops[:, None] - new + torch.arange(new, device="cpu")).clamp_min(0)

    def append(self, k: Tensor, v: Tensor, new_lengths: Sequence[int] | Tensor | None = None) -> None:
        """Append tokens that every rank holds; each rank stores those that it owns, and nothing is sent.

        Args:
            k: [batch, new, kv_heads, head_dim], the same on all ranks; float16, bfloat16, float32 or float64.
                The cache takes its dtype and device.
            v: [batch, new, kv_heads, v_head_dim], in the dtype of k.
            new_lengths: [batch], the number of real new tokens of each sequence, which are its last ones: pad prompts
                of different lengths on the left; padding is not stored. None: all tokens are real.

        Raises:
            TypeError, ValueError: k and v do not match each other or the cache; no space is left; autograd records.
        """
        k, v = _checked(k, v)
        batch, new = k.shape[:2]
        added = _as_list(new_lengths)
        if added is None:
            added = [new] * batch
        elif len(added) != batch or not all(0 <= n <= new for n in added):
            raise ValueError(f"new_lengths is {added}; it must be {batch} numbers from 0 to the {new} new tokens.")
        before = self._before(batch)
        after = [length + n for length, n in zip(before, added, strict=True)]
        self._reserve(k, v, after)
        count = self._layout.count
        for seqs, (first, last) in equal_length_runs(list(zip(before, after, strict=True)), self.one_by_one):
            start, stop = count(first), count(last)
            if start < stop:
                # The new tokens are the last ones of the sequence.
                own = torch.from_numpy(self._layout.indices(start, stop) - (last - new)).to(k.device)
                rows = torch.arange(start, stop, device=k.device)
                self._write(seqs, rows, k[seqs].index_select(1, own), v[seqs].index_select(1, own))
        self._set_lengths(after)

    def append_sharded(self, k: Tensor, v: Tensor, *, layout: str = "zigzag", seq_len: int | None = None) -> None:
        """Append tokens that `shard_sequence` has sharded over the ranks; one all-to-all sends them to their owners.

        Args:
            k, v: as for `append`, but [batch, this rank's shard of the new tokens, ...]. All sequences must be
                equally long.
            layout: "zigzag" or "contiguous", as given to `shard_sequence`.
            seq_len: number of new tokens over all ranks, needed if the ranks' shards are unequal.

        Raises:
            TypeError, ValueError: as `append`; sequences that are not equally long.
            CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not call it, or with another layout,
                seq_len, block or length of the cache (compared always on CPU, elsewhere with FUSED_TP_CHECK=1).
        """
        k, v = _checked(k, v)
        check_layout(layout)
        group = resolve_group(self.group)
        seq_len = total_length("seq_len", seq_len, "k", k.shape[1], group.size, group.rank, layout)
        before = self._before(k.shape[0])
        if len(set(before)) != 1:
            raise ValueError(
                f"the sequences of the cache have {before} tokens; append_sharded needs equally many, use append."
            )
        after = [before[0] + seq_len] * len(before)
        self._reserve(k, v, after)
        both = torch.cat([k, v], -1).transpose(0, 1)
        words = f"layout={layout!r}, seq_len={seq_len}"
        tokens, arrived = scatter_new_tokens(
            group, self.block, all_tokens(seq_len, group.size, layout), before[0], both, words
        )
        rows = torch.from_numpy(self._layout.rows(tokens)).to(k.device)
        arrived = arrived.transpose(0, 1)
        for seqs, _ in equal_length_runs(before, self.one_by_one):
            self._write(seqs, rows, arrived[seqs, ..., : k.shape[-1]], arrived[seqs, ..., k.shape[-1] :])
        self._set_lengths(after)

    @overload
    def attend(self, q: Tensor, *, tokens: int = 0, **keywords: Unpack[ScoreOutKeywords]) -> Tensor: ...

    @overload
    def attend(
        self, q: Tensor, *, tokens: int = 0, **keywords: Unpack[ScoreOutAndLseKeywords]
    ) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, q: Tensor, *, return_lse: bool = False, tokens: int = 0, **keywords: Unpack[ScoreKeywords]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run `context_parallel_decode` over the cache for q [batch, new, heads, head_dim], the last tokens appended.

        The keywords are those of `context_parallel_decode`: causal, scale, window, softcap, alibi_slopes, sinks,
        return_lse. `tokens`: a checksum of the new tokens below 2**24, which the ranks compare; 0 if they are not
        known.
        """
        check_tensor("q", q)
        check_keywords("attend", keywords, SCORE_KEYWORDS)
        keys, values, table = self._shards(q)
        where: dict[str, Any] = {"block": self.block, "tokens": tokens, "group": self.group, **keywords}
        out, lse = decode(DecodeArguments(q, keys, values, _on_host(self._before(q.shape[0])), table, **where))
        return (out, lse) if return_lse else out

    one_by_one = False  # True if `_write` takes one sequence at a time

    @abstractmethod
    def _lengths(self) -> list[int]: ...

    @abstractmethod
    def _set_lengths(self, lengths: list[int]) -> None: ...

    @abstractmethod
    def _reserve(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        """Allocate space for sequences of these lengths, or raise ValueError on all ranks."""

    @abstractmethod
    def _write(self, seqs: slice, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [seqs, n, kv_heads, dim] into these n rows."""

    @abstractmethod
    def _shards(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """k_cache_shard, v_cache_shard and page_table of `context_parallel_decode`."""

    def _before(self, batch: int) -> list[int]:
        lengths = self._lengths() or [0] * batch
        if len(lengths) != batch:
            raise ValueError(f"the cache holds {len(lengths)} sequences and got a batch of {batch}; reset() it before.")
        return lengths


class ContextKVCache(ContextCache):
    """One attention layer's keys and values, sharded over the ranks of `group`: [batch, tokens / W, ...].

    For `ParallelAttention(..., cp_group=group)`, or for any model with two calls per layer and step,

        cache.append(k, v)                                # rotated keys and values of the new tokens, on all ranks
        out = cache.attend(q, scale=..., window=...)      # q [batch, new, heads, head_dim] -> [batch, new, heads, dim]

    where new is the prompt's length, a chunk of it, or 1. Before them `positions(new)` returns the positions of the new
    tokens. `length` is the length of the longest sequence, `lengths` that of each. `reset` removes all tokens, `crop`
    the last ones (rejected drafts), and `reorder` selects other sequences for the batch (beam search). Pad prompts of
    different lengths on the left and pass `new_lengths`, the sums of the rows of their attention mask.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        block: consecutive tokens on one rank; see `context_parallel_decode`.
        max_length: allocate space for sequences of this many tokens at once, which never moves; None: grow by doubling.

    Raises:
        ValueError: more tokens than `max_length`, or as `append`; on all ranks.

    Example:
        >>> cache = ContextKVCache(mesh["cp"])
        >>> with torch.no_grad():
        ...     y = attention(prompt, kv_cache=cache)           # [1, 100000, hidden] on every rank of the group
        ...     y = attention(next_token, kv_cache=cache)       # [1, 1, hidden]
    """

    def __init__(self, group: GroupLike, *, block: int = DEFAULT_BLOCK, max_length: int | None = None) -> None:
        super().__init__(group, block)
        self._held: list[int] = []
        self._rows = _DenseCache("ContextKVCache", max_length, self._layout.count)

    @property
    def max_length(self) -> int | None:
        """The `max_length` of the constructor."""
        return self._rows.max_length

    def reset(self) -> None:
        """Remove all sequences; the memory is kept for others of the same shape."""
        self._held = []

    def crop(self, length: int) -> None:
        """Keep only the first `length` tokens of each sequence."""
        check_int("length", length, 0, ": how many tokens of a sequence are kept")
        self._held = [min(held, length) for held in self._held]

    def reorder(self, sequences: Tensor) -> None:
        """Replace sequence i by sequence sequences[i]; int64 [batch], the same on all ranks."""
        check_local("sequences", sequences)
        rows = self._rows
        if rows.keys is None or rows.values is None:
            raise ValueError("the cache is empty: there are no sequences to reorder.")
        wanted = sequences.tolist()
        if not all(0 <= sequence < len(self._held) for sequence in wanted):
            raise ValueError(f"sequences is {wanted}; the cache holds the sequences 0 to {len(self._held) - 1}.")
        sequences = sequences.to(rows.keys.device)
        rows.keys, rows.values = rows.keys[sequences], rows.values[sequences]
        self._held = [self._held[sequence] for sequence in wanted]

    def _lengths(self) -> list[int]:
        return self._held

    def _set_lengths(self, lengths: list[int]) -> None:
        self._held = lengths

    def _reserve(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        self._rows.reserve(k, v, self.length, max(lengths))

    def _write(self, seqs: slice, rows: Tensor, k: Tensor, v: Tensor) -> None:
        for held, new in ((self._rows.keys, k), (self._rows.values, v)):
            assert held is not None  # _reserve has made it
            held[seqs].index_copy_(1, rows, new)

    def _shards(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return *_not_empty(self._rows.keys, self._rows.values), None


class PagedContextKVCache:
    """One attention layer's keys and values of many sequences of different lengths, in pages of one pool on each rank.

    A sequence takes pages as it grows and returns them when it is freed. Pass `batch(sequences)` as `kv_cache` to a
    forward pass over some of them; it has the `append` and `attend` of `ContextKVCache`.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        pages: number of pages in the pool of each rank.
        page_size: rows of a page, one for each token that this rank holds.
        block: consecutive tokens on one rank; see `context_parallel_decode`. Default: page_size.

    Raises:
        ValueError: there are not enough pages left, on all ranks; an unknown sequence.

    Example:
        >>> cache = PagedContextKVCache(mesh["cp"], pages=4096)
        >>> one, other = cache.allocate(), cache.allocate()
        >>> with torch.no_grad():
        ...     y = attention(prompt, kv_cache=cache.batch([one]))
        ...     y = attention(next_tokens, kv_cache=cache.batch([one, other]))    # [2, 1, hidden]
        >>> cache.free(one)

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv:2309.06180.
    """

    def __init__(
        self, group: GroupLike, pages: int, *, page_size: int = DEFAULT_BLOCK, block: int | None = None
    ) -> None:
        check_positive("pages", pages)
        check_positive("page_size", page_size)
        block = page_size if block is None else block
        check_positive("block", block)
        self.group = group
        self.pages = pages
        self.page_size = page_size
        self.block = block
        # Rank 0 holds at least as much of every sequence as any other rank. All ranks count rank 0's pages, so that all
        # raise together when none are left: if only one rank raised, the others would wait for it.
        self._most = BlockCyclicLayout(group_identity(group)[1], 0, block)
        self._free = list(range(pages))  # a heap, so that the pages of a sequence are neighbours if possible
        self._pages_of: dict[int, list[int]] = {}
        self._length_of: dict[int, int] = {}
        self._next = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self) -> int:
        """Create a sequence without tokens, and return its number."""
        sequence, self._next = self._next, self._next + 1
        self._pages_of[sequence], self._length_of[sequence] = [], 0
        return sequence

    def free(self, sequence: int) -> None:
        """Remove a sequence and return its pages to the pool."""
        self.crop(sequence, 0)
        del self._pages_of[sequence], self._length_of[sequence]

    def crop(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""
        self._known(sequence)
        check_int("length", length, 0, ": how many tokens of a sequence are kept")
        self._length_of[sequence] = min(self._length_of[sequence], length)
        pages, kept = self._pages_of[sequence], self._needed(self._length_of[sequence])
        for page in pages[kept:]:
            heapq.heappush(self._free, page)
        del pages[kept:]

    def length_of(self, sequence: int) -> int:
        """Number of tokens of a sequence over all ranks."""
        self._known(sequence)
        return self._length_of[sequence]

    def batch(self, sequences: Sequence[int]) -> ContextCache:
        """The cache of a forward pass over these sequences, in this order."""
        if not isinstance(sequences, (list, tuple)):
            raise TypeError(
                f"sequences must be a list of numbers that allocate() gave, not {type(sequences).__name__}."
            )
        for sequence in sequences:
            self._known(sequence)
        if len(set(sequences)) < len(sequences) or not sequences:
            raise ValueError(
                f"sequences is {list(sequences)}; it must name at least one sequence, and each of them once."
            )
        return _Sequences(self, list(sequences))

    def _known(self, sequence: int) -> None:
        if sequence not in self._pages_of:
            raise ValueError(f"there is no sequence {sequence} in the cache (any more); allocate() gives new ones.")

    def _needed(self, length: int) -> int:
        return -(-self._most.count(length) // self.page_size)

    def _reserve(self, k: Tensor, v: Tensor, sequences: list[int], lengths: list[int]) -> None:
        wanted = {
            sequence: self._needed(length) - len(self._pages_of[sequence])
            for sequence, length in zip(sequences, lengths, strict=True)
        }
        missing = sum(max(0, n) for n in wanted.values())
        if missing > len(self._free):
            raise ValueError(
                f"the cache has {len(self._free)} of its {self.pages} pages of {self.page_size} tokens left and needs "
                f"{missing} more; free() sequences that are done, or make the pool larger."
            )
        for name, x in (("keys", k), ("values", v)):
            pool = getattr(self, f"_{name}")
            if pool is None:
                setattr(self, f"_{name}", x.new_empty((self.pages, self.page_size, *x.shape[2:])))
            elif (*pool.shape[2:], pool.dtype, pool.device) != (*x.shape[2:], x.dtype, x.device):
                raise ValueError(
                    f"the cache has pages of {name} of (kv_heads, head_dim) = {tuple(pool.shape[2:])} in {pool.dtype} "
                    f"on {pool.device} and got {tuple(x.shape[2:])} in {x.dtype} on {x.device}."
                )
        for sequence, n in wanted.items():
            self._pages_of[sequence] += [heapq.heappop(self._free) for _ in range(n)]


class _Sequences(ContextCache):
    """Some sequences of a PagedContextKVCache."""

    one_by_one = True

    def __init__(self, pool: PagedContextKVCache, sequences: list[int]) -> None:
        super().__init__(pool.group, pool.block)
        self._pool, self._sequences = pool, sequences

    def _lengths(self) -> list[int]:
        return [self._pool.length_of(sequence) for sequence in self._sequences]

    def _set_lengths(self, lengths: list[int]) -> None:
        self._pool._length_of.update(zip(self._sequences, lengths, strict=True))

    def _reserve(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        self._pool._reserve(k, v, self._sequences, lengths)

    def _write(self, seqs: slice, rows: Tensor, k: Tensor, v: Tensor) -> None:
        pages = _on_host(self._pool._pages_of[self._sequences[seqs.start]]).to(rows.device)
        size = self._pool.page_size
        where = pages[rows // size] * size + rows % size
        for pool, new in ((self._pool._keys, k), (self._pool._values, v)):
            assert pool is not None
            pool.flatten(0, 1).index_copy_(0, where, new[0])

    def _shards(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        keys, values = _not_empty(self._pool._keys, self._pool._values)
        pages = [self._pool._pages_of[sequence] for sequence in self._sequences]
        most = max(map(len, pages))
        table = torch.tensor([one + [0] * (most - len(one)) for one in pages], dtype=torch.int32, device="cpu")
        return keys, values, table.view(len(pages), most)


def _on_host(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device="cpu")


def _checked(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Check k and v and cast them to the dtype of matmuls: under autocast, rotary embeddings change the dtype of k."""
    for name, t in (("k", k), ("v", v)):
        check_tensor(name, t)
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ValueError("a cache is written in place, which autograd cannot follow; generate under torch.no_grad().")
    dtype = autocast_dtype(k)
    if dtype is not None:
        k, v = cast(dtype, k, v)
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            "k and v must be alike but for head_dim, [batch, new, kv_heads, head_dim]; got "
            f"{tuple(k.shape)} {k.dtype} on {k.device} and {tuple(v.shape)} {v.dtype} on {v.device}."
        )
    return k, v


def _not_empty(keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor]:
    if keys is None or values is None:
        raise ValueError("the cache is empty; append the keys and values of the queries' tokens first.")
    return keys, values


def _as_list(lengths: Sequence[int] | Tensor | None) -> list[int] | None:
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        if lengths.is_floating_point():
            raise TypeError(f"new_lengths has dtype {lengths.dtype}; it must be int32 or int64.")
        lengths = lengths.tolist()
    return [int(n) for n in lengths]
