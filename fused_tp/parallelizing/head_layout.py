"""Features of attention layers by heads, for numbers of ranks that do not divide the heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fused_tp.core.heads import RankHeads, partition_heads
from fused_tp.nn.feature_exchange import FeatureExchange, Ranges, chunks

NUM_GROUPS = "num_key_value_groups"
"""Attribute with which attention modules of transformers repeat each key/value head for its query heads."""


def counts_kv_heads(attribute: str) -> bool:
    """True if the attribute `attribute` of an attention module is its number of key/value heads."""
    return ("kv" in attribute or "key_value" in attribute) and attribute != NUM_GROUPS


class HeadLayout(NamedTuple):
    """Heads of the features of one layer, and their distribution over ranks.

    Attributes:
        kind: order of the features: "query" or "kv" for one kind of heads, "packed" for all query heads, then all heads
            of keys, then of values, and "grouped" for the query heads of a key/value head, followed by its key and its
            value, one key/value head after the other. "multi_query": see `MultiQueryLinear`.
        num_heads, num_kv_heads: numbers of heads of all ranks.
        keeps_groups: see `partition_heads`.
    """

    kind: str
    num_heads: int
    num_kv_heads: int
    keeps_groups: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks of equal length, one for each head of each kind, that the features consist of."""
        numbers = {"query": self.num_heads, "kv": self.num_kv_heads}
        return numbers.get(self.kind, self.num_heads + 2 * self.num_kv_heads)

    def partition(self, num_ranks: int) -> tuple[RankHeads, ...]:
        """Return the heads of each rank."""
        return partition_heads(self.num_heads, self.num_kv_heads, num_ranks, keeps_groups=self.keeps_groups)

    def output_exchange(self, num_features: int, num_ranks: int) -> FeatureExchange:
        """Return the exchange from the shards of a layer's output features to the features of each rank's heads."""
        return FeatureExchange(chunks(num_features, num_ranks), self._ranges(num_features, num_ranks))

    def input_exchange(self, num_features: int, num_ranks: int) -> FeatureExchange:
        """Return the exchange from the features of each rank's heads to the shards of a layer's input features."""
        return FeatureExchange(self._ranges(num_features, num_ranks), chunks(num_features, num_ranks))

    def _ranges(self, num_features: int, num_ranks: int) -> tuple[Ranges, ...]:
        width = num_features // self.num_blocks
        return tuple(
            tuple((block * width, (block + count) * width) for block, count in self._blocks(heads))
            for heads in self.partition(num_ranks)
        )

    def _blocks(self, heads: RankHeads) -> Iterator[tuple[int, int]]:
        """Yield (first block, number of blocks) of a rank, in the order in which its attention reads them."""
        group_size, local_group_size = self.num_heads // self.num_kv_heads, heads.group_size
        if self.kind in ("query", "packed"):
            yield heads.start, heads.num_heads
        if self.kind == "kv":
            yield from ((head, 1) for head in heads.kv_heads)
        if self.kind == "packed":
            yield from ((self.num_heads + head, 1) for head in heads.kv_heads)
            yield from ((self.num_heads + self.num_kv_heads + head, 1) for head in heads.kv_heads)
        if self.kind == "grouped":
            for index, head in enumerate(heads.kv_heads):
                first_block = head * (group_size + 2)
                yield first_block + (heads.start + index * local_group_size) % group_size, local_group_size
                yield first_block + group_size, 2
