"""What the tests compile of the attention kernels: configs that ship, plain and with everything scores may have.

bf16 for all head dims; rich ones of 64 have the configs of 128. fp16 differs from bf16 in the name of a type, so it is
compiled once per kernel, with a head dim of v that is not that of q; fp32 in a head dim of 128; fp8 of the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..resources import Variant
from .configs import AttentionConfig, attention_config, config_arguments, padded

# By launches made to be of any value, so that none is compiled anew for a round one.
ODD = (
    "tile_count",
    "heads",
    "batch_heads",
    "together",
    "shared",
    "seed_low",
    "seed_high",
    "dropped_below",
    "first_head",
)


@dataclass(frozen=True)
class Shape:
    """One launch: `rich` has softcap, slopes, dropout and fewer heads of keys than of queries."""

    kernel: str
    arch: int
    kind: str
    head_dim: int
    v_head_dim: int
    rich: bool
    config: AttentionConfig

    @property
    def dtype(self) -> str:
        return {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv"}.get(self.kind, "fp32")

    def descriptor(self, width: int, *, turned: bool = False) -> str | None:
        """Of blocks of what the kernel walks through, where that is loaded by TMA."""
        rows, columns = self.config.block, padded(width)
        block = f"{columns}, {rows}" if turned else f"{rows}, {columns}"
        return f"tensordesc<{self.dtype}[1, 1, {block}]>" if self.config.tma else None

    def sums(self) -> dict[str, Any]:
        """What both kernels of the backward read beside q, k and v."""
        return {
            "grad_out": f"*{self.dtype}",
            **dict.fromkeys(("lse", "sums"), "*fp32"),
            "grad_strides": ("i32",) * 3,
            **dict.fromkeys(("lse_strides", "sums_strides"), ("i32",) * 2),
        }

    def variant(
        self,
        function: Any,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any] | None = None,
        *,
        odd: Iterable[str] = (),
    ) -> Variant:
        given = config_arguments(
            self.config, self.head_dim, self.v_head_dim, "ieee" if self.dtype != "fp32" else self.kind
        )
        options = {name: given.pop(name) for name in self.config.options()}
        common: dict[str, Any] = {
            **dict.fromkeys("qkv", f"*{self.dtype}"),
            "slopes": "*fp32" if self.rich else None,
            **dict.fromkeys(("places", "q_indices", "k_indices", "tiles"), "*i32"),
            **dict.fromkeys((*ODD, "heads"), "i32"),
            "shared": "i32" if self.rich else 1,
            **dict.fromkeys(("scale", "softcap", "keep_scale"), "fp32"),
            **dict.fromkeys(("q_strides", "k_strides", "v_strides"), ("i32",) * 3),
        }
        flags = {"CAPPED": self.rich, "DROPOUT": self.rich, "TMA": self.config.tma}
        dims = str(self.head_dim) + (f"/{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        name = f"{self.kind} {dims} {'rich ' if self.rich else ''}{self.config}"
        # wgmma and tcgen05 take 64 rows, and fp32 in full precision has no matrix unit.
        units = self.dtype != "fp32" and (self.config.rows >= 64 or self.arch == 80)
        return Variant(
            f"attention {self.kernel}",
            name,
            self.arch,
            function,
            {**common, **arguments},
            {**given, **flags, **(constants or {})},
            options,
            frozenset((*ODD, "heads", "shared", *odd)),
            units,
        )


def attention_shapes(kernel: str, arch: int, *, fp8: bool = False) -> Iterator[Shape]:
    """What is compiled of `kernel` for `arch`; `fp8`: it takes that, too."""
    kinds = ("bf16", "fp8") if fp8 and arch > 80 else ("bf16",)
    sizes = [(dims, rich) for dims in (64, 128, 256) for rich in (False, True) if not rich or dims > 64]
    wanted = [(kind, dims, dims, rich) for kind in kinds for dims, rich in sizes]
    if arch == 90:
        wanted.append(("fp16", 192, 128, False))
    if arch == 80:  # those of fp32 are the same everywhere
        wanted += [("tf32", 128, 128, False), ("ieee", 128, 128, False)]
    for kind, head_dim, v_head_dim, rich in wanted:
        config = attention_config(kernel, arch, kind, max(head_dim, v_head_dim), plain=not rich)
        yield Shape(kernel, arch, kind, head_dim, v_head_dim, rich, config)
