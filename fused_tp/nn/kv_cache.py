"""Key/value caches: one for a single rank, and others that shard the tokens of each sequence over a group."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from fused_tp.attention.cache import scatter_new_tokens
from fused_tp.attention.decode import equal_length_runs
from fused_tp.attention.layout import DEFAULT_BLOCK, BlockCyclicLayout, check_layout, tokens_by_rank
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
        max_length: allocate memory for this many tokens at the first append, and never reallocate. None: grow by
            doubling, so that an append takes constant time per token on average.

    Raises:
        ValueError: there are more tokens than `max_length`; keys and values do not match each other or the cache; or
            autograd is recording.

    Example:
        >>> cache = KVCache(max_length=2048)
        >>> with torch.no_grad():
        ...     y = attention(prompt, kv_cache=cache)           # [1, 100, hidden]
        ...     y = attention(next_token, kv_cache=cache)       # [1, 1, hidden], sees 101 tokens
    """

    def __init__(self, max_length: int | None = None) -> None:
        self.length = 0
        self._storage = _DenseStorage("KVCache", max_length)

    @property
    def max_length(self) -> int | None:
        """The `max_length` of the constructor."""
        return self._storage.max_length

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [batch, new, heads, head_dim]; return views of all keys and values, oldest first."""
        k, v = _check_new_kv(k, v)
        start, stop = self.length, self.length + k.shape[1]
        keys, values = self._storage.reserve(k, v, start, stop)
        keys[:, start:stop] = k
        values[:, start:stop] = v
        self.length = stop
        return keys[:, :stop], values[:, :stop]

    def reset(self) -> None:
        """Remove all tokens; the memory is kept for the next sequences of a batch of the same size."""
        self.length = 0


class _DenseStorage:
    """Keys and values [batch, capacity, heads, dim] that grow by doubling."""

    def __init__(self, owner: str, max_length: int | None, count_rows: Callable[[int], int] = int) -> None:
        """Initialize without tokens. `count_rows` maps a number of tokens to the number of rows stored on this rank."""
        if max_length is not None:
            check_positive("max_length", max_length)
        self.owner, self.max_length, self.count_rows = owner, max_length, count_rows
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def reserve(self, k: Tensor, v: Tensor, length: int, num_needed_tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values with space for `num_needed_tokens` tokens; the first `length` tokens are kept."""
        if self.max_length is not None and num_needed_tokens > self.max_length:
            raise ValueError(
                f"the {self.owner} has room for max_length={self.max_length} tokens of a sequence, but "
                f"{num_needed_tokens} are needed. Increase max_length, or omit it to let the cache grow."
            )
        num_used_rows, num_needed_rows = self.count_rows(length), self.count_rows(num_needed_tokens)
        num_rows = (
            max(num_needed_rows, 2 * num_used_rows, 16) if self.max_length is None else self.count_rows(self.max_length)
        )
        for name, new_tensor in (("keys", k), ("values", v)):
            stored_tensor: Tensor | None = getattr(self, name)
            if stored_tensor is not None:
                stored_format, new_format = (
                    (x.shape[0], *x.shape[2:], x.dtype, x.device) for x in (stored_tensor, new_tensor)
                )
                if stored_format != new_format and length > 0:
                    raise ValueError(
                        f"the {self.owner} holds {name} with (batch, kv_heads, head_dim, dtype, device) = "
                        f"{stored_format}, but got {new_format}. Call reset() before another batch."
                    )
                if stored_format == new_format and num_needed_rows <= stored_tensor.shape[1]:
                    continue
            larger_tensor = new_tensor.new_empty((new_tensor.shape[0], num_rows, *new_tensor.shape[2:]))
            if stored_tensor is not None and length > 0:
                larger_tensor[:, :num_used_rows] = stored_tensor[:, :num_used_rows]
            setattr(self, name, larger_tensor)
        return _require_filled(self.keys, self.values)


class ContextCache(ABC):
    """Base class of caches that shard one attention layer's keys and values over the ranks of a group.

    In every forward pass, first `append` the new tokens, then `attend` with their queries, on all ranks of the group.
    For inference only: the cache is written in place, which autograd does not support.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        block: number of consecutive tokens on one rank, as in `context_parallel_decode`.
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
        return list(self._sequence_lengths())

    @property
    def length(self) -> int:
        """Length of the longest sequence."""
        return max(self._sequence_lengths(), default=0)

    def positions(self, new: int, new_lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return the positions of the next `new` tokens.

        The result is int64 [new] if all sequences have equal length and `new_lengths`, the number of real new tokens of
        each sequence, is None. Otherwise it is [batch, new], with 0 for padding.
        """
        lengths, added_lengths = self._sequence_lengths(), _as_list(new_lengths)
        if len(set(lengths)) <= 1 and added_lengths is None:
            start = lengths[0] if lengths else 0
            return torch.arange(start, start + new, device="cpu")
        added_lengths = [new] * len(lengths) if added_lengths is None else added_lengths
        lengths = lengths or [0] * len(added_lengths)
        stops = _to_int64_cpu(length + n for length, n in zip(lengths, added_lengths, strict=True))
        return (stops[:, None] - new + torch.arange(new, device="cpu")).clamp_min(0)

    def append(self, k: Tensor, v: Tensor, new_lengths: Sequence[int] | Tensor | None = None) -> None:
        """Append tokens that every rank holds. Each rank stores the tokens that it owns, and nothing is sent.

        Args:
            k: [batch, new, kv_heads, head_dim], equal on all ranks; float16, bfloat16, float32 or float64. The first k
                determines the dtype and the device of the cache.
            v: [batch, new, kv_heads, v_head_dim], in the dtype of k.
            new_lengths: [batch], the number of real new tokens of each sequence. Pad shorter prompts on the left;
                padding is not stored. None: all tokens are real.

        Raises:
            TypeError, ValueError: k and v do not match each other or the cache; no memory is left in the cache; or
                autograd is recording.
        """
        k, v = _check_new_kv(k, v)
        batch, num_new = k.shape[:2]
        added_lengths = _as_list(new_lengths)
        if added_lengths is None:
            added_lengths = [num_new] * batch
        elif len(added_lengths) != batch or not all(0 <= n <= num_new for n in added_lengths):
            raise ValueError(
                f"new_lengths must be {batch} numbers from 0 to {num_new}, the number of new tokens, got "
                f"{added_lengths}."
            )
        old_lengths = self._current_lengths(batch)
        total_lengths = [length + n for length, n in zip(old_lengths, added_lengths, strict=True)]
        self._reserve(k, v, total_lengths)
        count_rows = self._layout.count_before
        for seqs, (old_length, new_length) in equal_length_runs(
            list(zip(old_lengths, total_lengths, strict=True)), self.writes_one_sequence
        ):
            start, stop = count_rows(old_length), count_rows(new_length)
            if start < stop:
                # The new tokens are the last ones of the sequence.
                local_indices = torch.from_numpy(self._layout.indices(start, stop) - (new_length - num_new)).to(
                    k.device
                )
                rows = torch.arange(start, stop, device=k.device)
                self._write(seqs, rows, k[seqs].index_select(1, local_indices), v[seqs].index_select(1, local_indices))
        self._set_sequence_lengths(total_lengths)

    def append_sharded(self, k: Tensor, v: Tensor, *, layout: str = "zigzag", seq_len: int | None = None) -> None:
        """Append tokens that `shard_sequence` has sharded over the ranks; one all-to-all sends them to their owners.

        Args:
            k, v: as in `append`, but [batch, this rank's shard of the new tokens, ...]. All sequences must have equal
                length.
            layout: "zigzag" or "contiguous", the layout passed to `shard_sequence`.
            seq_len: number of new tokens over all ranks; needed if the ranks' shards differ in length.

        Raises:
            TypeError, ValueError: as in `append`, or sequences differ in length.
            CollectiveTimeoutError, PeerLostError: a peer did not make the call.
            RankMismatchError: a peer passed another layout, seq_len, block or length of the cache. Always checked on
                the CPU; on a GPU only with FUSED_TP_CHECK=1.
        """
        k, v = _check_new_kv(k, v)
        check_layout(layout)
        group = resolve_group(self.group)
        seq_len = total_length("seq_len", seq_len, "k", k.shape[1], group.size, group.rank, layout)
        old_lengths = self._current_lengths(k.shape[0])
        if len(set(old_lengths)) != 1:
            raise ValueError(
                f"append_sharded needs sequences of equal length, but the cached sequences have {old_lengths} tokens. "
                "Use append."
            )
        total_lengths = [old_lengths[0] + seq_len] * len(old_lengths)
        self._reserve(k, v, total_lengths)
        keys_and_values = torch.cat([k, v], -1).transpose(0, 1)
        description = f"layout={layout!r}, seq_len={seq_len}"
        tokens, received_rows = scatter_new_tokens(
            group, self.block, tokens_by_rank(seq_len, group.size, layout), old_lengths[0], keys_and_values, description
        )
        rows = torch.from_numpy(self._layout.rows(tokens)).to(k.device)
        received_rows = received_rows.transpose(0, 1)
        for seqs, _ in equal_length_runs(old_lengths, self.writes_one_sequence):
            self._write(seqs, rows, received_rows[seqs, ..., : k.shape[-1]], received_rows[seqs, ..., k.shape[-1] :])
        self._set_sequence_lengths(total_lengths)

    @overload
    def attend(self, q: Tensor, *, tokens: int = 0, **keywords: Unpack[ScoreOutKeywords]) -> Tensor: ...

    @overload
    def attend(
        self, q: Tensor, *, tokens: int = 0, **keywords: Unpack[ScoreOutAndLseKeywords]
    ) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, q: Tensor, *, return_lse: bool = False, tokens: int = 0, **keywords: Unpack[ScoreKeywords]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run `context_parallel_decode` over the cache.

        Args:
            q: queries [batch, new, heads, head_dim] of the tokens that were appended last.
            tokens: checksum, below 2**24, of the ids of the new tokens, which the ranks compare; 0 if it is unknown.
            keywords: those of `context_parallel_decode`: causal, scale, window, softcap, alibi_slopes, sinks,
                return_lse.
        """
        check_tensor("q", q)
        check_keywords("attend", keywords, SCORE_KEYWORDS)
        keys, values, page_table = self._cache_shards(q)
        options: dict[str, Any] = {"block": self.block, "tokens": tokens, "group": self.group, **keywords}
        out, lse = decode(
            DecodeArguments(q, keys, values, _to_int64_cpu(self._current_lengths(q.shape[0])), page_table, **options)
        )
        return (out, lse) if return_lse else out

    writes_one_sequence = False  # True if `_write` takes one sequence at a time

    @abstractmethod
    def _sequence_lengths(self) -> list[int]: ...

    @abstractmethod
    def _set_sequence_lengths(self, lengths: list[int]) -> None: ...

    @abstractmethod
    def _reserve(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        """Allocate space for sequences of these lengths, or raise ValueError on all ranks."""

    @abstractmethod
    def _write(self, seqs: slice, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [seqs, n, kv_heads, dim] into the n `rows` of the sequences `seqs`."""

    @abstractmethod
    def _cache_shards(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the arguments k_cache_shard, v_cache_shard and page_table of `context_parallel_decode`."""

    def _current_lengths(self, batch: int) -> list[int]:
        lengths = self._sequence_lengths() or [0] * batch
        if len(lengths) != batch:
            raise ValueError(
                f"the cache holds {len(lengths)} sequences, but got a batch of {batch}. Call reset() before another "
                "batch."
            )
        return lengths


class ContextKVCache(ContextCache):
    """One attention layer's keys and values, sharded over the ranks of `group`: [batch, tokens / W, ...].

    Pass it to `ParallelAttention(..., cp_group=group)`, or call it in any other model, twice per layer and step:

        cache.append(k, v)                                # rotated keys and values of the new tokens, on all ranks
        out = cache.attend(q, scale=..., window=...)      # q [batch, new, heads, head_dim] -> [batch, new, heads, dim]

    `new` is the length of the prompt or of a chunk of it, or 1. `positions(new)`, called before `append`, returns the
    positions of the new tokens. `reset` removes all tokens, `crop` removes the last tokens (rejected drafts), and
    `reorder` selects the sequences of the batch (beam search). Pad prompts of different lengths on the left, and pass
    `new_lengths`, the sums of the rows of their attention mask.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        block: number of consecutive tokens on one rank; see `context_parallel_decode`.
        max_length: allocate memory for sequences of this many tokens at the first append, and never reallocate.
            None: grow by doubling.

    Raises:
        ValueError: there are more tokens than `max_length`, or as in `append`. Raised on all ranks.

    Example:
        >>> cache = ContextKVCache(mesh["cp"])
        >>> with torch.no_grad():
        ...     y = attention(prompt, kv_cache=cache)           # [1, 100000, hidden] on every rank of the group
        ...     y = attention(next_token, kv_cache=cache)       # [1, 1, hidden]
    """

    def __init__(self, group: GroupLike, *, block: int = DEFAULT_BLOCK, max_length: int | None = None) -> None:
        super().__init__(group, block)
        self._token_counts: list[int] = []
        self._storage = _DenseStorage("ContextKVCache", max_length, self._layout.count_before)

    @property
    def max_length(self) -> int | None:
        """The `max_length` of the constructor."""
        return self._storage.max_length

    def reset(self) -> None:
        """Remove all sequences; the memory is kept for the next sequences of the same shape."""
        self._token_counts = []

    def crop(self, length: int) -> None:
        """Keep only the first `length` tokens of each sequence."""
        check_int("length", length, 0, ", the number of tokens that are kept")
        self._token_counts = [min(count, length) for count in self._token_counts]

    def reorder(self, sequences: Tensor) -> None:
        """Replace sequence i by sequence `sequences[i]`. `sequences` is int64 [batch], and equal on all ranks."""
        check_local("sequences", sequences)
        storage = self._storage
        if storage.keys is None or storage.values is None:
            raise ValueError("the cache is empty, so reorder has no sequences. Call append first.")
        sequence_indices = sequences.tolist()
        if not all(0 <= sequence < len(self._token_counts) for sequence in sequence_indices):
            raise ValueError(
                f"sequences must be numbers from 0 to {len(self._token_counts) - 1}, got {sequence_indices}."
            )
        sequences = sequences.to(storage.keys.device)
        storage.keys, storage.values = storage.keys[sequences], storage.values[sequences]
        self._token_counts = [self._token_counts[sequence] for sequence in sequence_indices]

    def _sequence_lengths(self) -> list[int]:
        return self._token_counts

    def _set_sequence_lengths(self, lengths: list[int]) -> None:
        self._token_counts = lengths

    def _reserve(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        self._storage.reserve(k, v, self.length, max(lengths))

    def _write(self, seqs: slice, rows: Tensor, k: Tensor, v: Tensor) -> None:
        for stored_tensor, new_rows in ((self._storage.keys, k), (self._storage.values, v)):
            assert stored_tensor is not None  # allocated by _reserve
            stored_tensor[seqs].index_copy_(1, rows, new_rows)

    def _cache_shards(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return *_require_filled(self._storage.keys, self._storage.values), None


class PagedContextKVCache:
    """One attention layer's keys and values of many sequences of different lengths, in a pool of pages on each rank.

    A sequence takes pages from the pool as it grows, and returns them when it is freed. For a forward pass over some of
    the sequences, pass `batch(sequences)` as `kv_cache`. Its methods `append` and `attend` are those of
    `ContextKVCache`.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        pages: number of pages in the pool of each rank.
        page_size: number of tokens in a page.
        block: number of consecutive tokens on one rank; see `context_parallel_decode`. Default: page_size.

    Raises:
        ValueError: not enough pages are free (raised on all ranks), or a sequence is unknown.

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
        # Rank 0 holds at least as many tokens of every sequence as any other rank. All ranks count rank 0's pages, so
        # that all raise together when no page is left. If only one rank raised, the other ranks would wait for it.
        self._rank0_layout = BlockCyclicLayout(group_identity(group)[1], 0, block)
        self._free_page_heap = list(range(pages))  # a heap, so that a sequence gets adjacent pages if possible
        self._pages_by_sequence: dict[int, list[int]] = {}
        self._length_by_sequence: dict[int, int] = {}
        self._next_sequence = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free_page_heap)

    def allocate(self) -> int:
        """Create a sequence without tokens, and return its number."""
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._pages_by_sequence[sequence], self._length_by_sequence[sequence] = [], 0
        return sequence

    def free(self, sequence: int) -> None:
        """Remove a sequence and return its pages to the pool."""
        self.crop(sequence, 0)
        del self._pages_by_sequence[sequence], self._length_by_sequence[sequence]

    def crop(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence."""
        self._check_allocated(sequence)
        check_int("length", length, 0, ", the number of tokens that are kept")
        self._length_by_sequence[sequence] = min(self._length_by_sequence[sequence], length)
        pages, num_kept = self._pages_by_sequence[sequence], self._num_pages(self._length_by_sequence[sequence])
        for page in pages[num_kept:]:
            heapq.heappush(self._free_page_heap, page)
        del pages[num_kept:]

    def length_of(self, sequence: int) -> int:
        """Number of tokens of a sequence over all ranks."""
        self._check_allocated(sequence)
        return self._length_by_sequence[sequence]

    def batch(self, sequences: Sequence[int]) -> ContextCache:
        """Return the cache for a forward pass over `sequences`, in this order."""
        if not isinstance(sequences, (list, tuple)):
            raise TypeError(
                f"sequences must be a list of numbers that allocate() returned, got {type(sequences).__name__}."
            )
        for sequence in sequences:
            self._check_allocated(sequence)
        if len(set(sequences)) < len(sequences) or not sequences:
            raise ValueError(
                f"sequences must contain at least one sequence, and each only once, got {list(sequences)}."
            )
        return _PagedBatch(self, list(sequences))

    def _check_allocated(self, sequence: int) -> None:
        if sequence not in self._pages_by_sequence:
            raise ValueError(
                f"sequence {sequence} was never allocated in this cache, or has been freed. Use allocate()."
            )

    def _num_pages(self, length: int) -> int:
        return -(-self._rank0_layout.count_before(length) // self.page_size)

    def _reserve(self, k: Tensor, v: Tensor, sequences: list[int], lengths: list[int]) -> None:
        pages_to_add = {
            sequence: self._num_pages(length) - len(self._pages_by_sequence[sequence])
            for sequence, length in zip(sequences, lengths, strict=True)
        }
        num_missing = sum(max(0, num_pages) for num_pages in pages_to_add.values())
        if num_missing > len(self._free_page_heap):
            raise ValueError(
                f"{num_missing} more pages of {self.page_size} tokens are needed, but only {len(self._free_page_heap)} "
                f"of the {self.pages} pages of the cache are free. Call free() for finished sequences, or increase "
                "pages."
            )
        for name, x in (("keys", k), ("values", v)):
            page_pool = getattr(self, f"_{name}")
            if page_pool is None:
                setattr(self, f"_{name}", x.new_empty((self.pages, self.page_size, *x.shape[2:])))
            elif (*page_pool.shape[2:], page_pool.dtype, page_pool.device) != (*x.shape[2:], x.dtype, x.device):
                raise ValueError(
                    f"{name} must have (kv_heads, head_dim) = {tuple(page_pool.shape[2:])}, {page_pool.dtype} and "
                    f"{page_pool.device}, like the pages of the cache, got {tuple(x.shape[2:])}, {x.dtype} and "
                    f"{x.device}."
                )
        for sequence, num_pages in pages_to_add.items():
            self._pages_by_sequence[sequence] += [heapq.heappop(self._free_page_heap) for _ in range(num_pages)]


class _PagedBatch(ContextCache):
    """Cache for a forward pass over some sequences of a PagedContextKVCache."""

    writes_one_sequence = True

    def __init__(self, pool: PagedContextKVCache, sequences: list[int]) -> None:
        super().__init__(pool.group, pool.block)
        self._pool, self._sequences = pool, sequences

    def _sequence_lengths(self) -> list[int]:
        return [self._pool.length_of(sequence) for sequence in self._sequences]

    def _set_sequence_lengths(self, lengths: list[int]) -> None:
        self._pool._length_by_sequence.update(zip(self._sequences, lengths, strict=True))

    def _reserve(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        self._pool._reserve(k, v, self._sequences, lengths)

    def _write(self, seqs: slice, rows: Tensor, k: Tensor, v: Tensor) -> None:
        pages = _to_int64_cpu(self._pool._pages_by_sequence[self._sequences[seqs.start]]).to(rows.device)
        size = self._pool.page_size
        pool_rows = pages[rows // size] * size + rows % size
        for page_pool, new_rows in ((self._pool._keys, k), (self._pool._values, v)):
            assert page_pool is not None
            page_pool.flatten(0, 1).index_copy_(0, pool_rows, new_rows[0])

    def _cache_shards(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        keys, values = _require_filled(self._pool._keys, self._pool._values)
        pages_by_sequence = [self._pool._pages_by_sequence[sequence] for sequence in self._sequences]
        max_pages = max(map(len, pages_by_sequence))
        page_table = torch.tensor(
            [sequence_pages + [0] * (max_pages - len(sequence_pages)) for sequence_pages in pages_by_sequence],
            dtype=torch.int32,
            device="cpu",
        )
        return keys, values, page_table.view(len(pages_by_sequence), max_pages)


def _to_int64_cpu(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def _check_new_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Check k and v, and cast them to the autocast dtype, since rotary embeddings may have changed the dtype of k."""
    for name, t in (("k", k), ("v", v)):
        check_tensor(name, t)
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ValueError("a KV cache does not support autograd, because it is written in place. Use torch.no_grad().")
    dtype = autocast_dtype(k)
    if dtype is not None:
        k, v = cast(dtype, k, v)
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            "k and v must be [batch, new, kv_heads, head_dim], and may differ in head_dim only; got "
            f"{tuple(k.shape)} {k.dtype} on {k.device} and {tuple(v.shape)} {v.dtype} on {v.device}."
        )
    return k, v


def _require_filled(keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor]:
    if keys is None or values is None:
        raise ValueError("the cache is empty. Append the keys and values of the queries' tokens first.")
    return keys, values


def _as_list(lengths: Sequence[int] | Tensor | None) -> list[int] | None:
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        if lengths.is_floating_point():
            raise TypeError(f"new_lengths must have dtype int32 or int64, got {lengths.dtype}.")
        lengths = lengths.tolist()
    return [int(n) for n in lengths]
