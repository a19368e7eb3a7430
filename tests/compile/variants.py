"""Variants that launches make Triton compile: kernels x dtypes x configs x architectures, for W = 8.

The launchers run with small CPU tensors instead of GPU tensors, and their launches are recorded. fp16 and bf16 differ
only in the name of a type, so fp16 is compiled once per kernel and config, with the loads that suit its architecture
best. With pointer loads K is not a multiple of a block, since masks along K take registers; with TMA it is. Layouts are
named as in BLAS: `nt` x [M, K] and weight [N, K] as stored, `nn` weight transposed (dX).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_tp.attention.kernels.triton import to_kernel_terms
from fused_tp.attention.layout import TokenLayout, TokenRanges
from fused_tp.attention.ring_fused import kv_chunks, make_keys_layout
from fused_tp.attention.ring_plan import make_step, ring_plan
from fused_tp.attention.spec import AttentionMask, Dropout, ScoreParameters
from fused_tp.triton_kernels import cross_entropy
from fused_tp.triton_kernels.attention import backward, decode, forward, ring_forward, ring_keys
from fused_tp.triton_kernels.attention import launch as attention_launch
from fused_tp.triton_kernels.attention.configs import AttentionConfig, attention_config, decode_config
from fused_tp.triton_kernels.comm.gather import GatherWorkspace, KernelLaunch, Shards, stage_launch
from fused_tp.triton_kernels.comm.signals import Workspace
from fused_tp.triton_kernels.device import OPERAND_KINDS
from fused_tp.triton_kernels.gemm import all_gather_gemm, gemm_sum
from fused_tp.triton_kernels.gemm.all_gather_gemm import Peers, no_arrivals
from fused_tp.triton_kernels.gemm.tiles import Launch, fused_configs

WORLD = 8
ARCHS = (80, 90, 100)
SAMPLE = 0  # stands in for an architecture: some variants of sm_90 (half a minute) and a few of the others
M, N, SEQ, HEADS, KV_HEADS = 256, 256, 128, 16, 8


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel."""

    kernel: str
    name: str
    arch: int
    launch: KernelLaunch
    matrix_instruction: bool = True  # must use the matrix instruction of its architecture

    @property
    def constants(self) -> Any:
        """The constexpr argument `C` of the launch."""
        return self.launch[2]["C"]


class Handle:
    """Fake handle of symmetric memory: all ranks share one buffer."""

    rank = 0

    def __init__(self, buffer: Tensor, world_size: int) -> None:
        self.buffer, self.world_size = buffer, world_size
        self.buffer_ptrs = [buffer.data_ptr()] * world_size

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None: ...

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        return self.buffer.view(dtype)[storage_offset:][: prod(sizes)].view(tuple(sizes))


def workspace_of(kind: Any, world_size: int = WORLD) -> Any:
    buffer = torch.empty(64 << 20, dtype=torch.uint8)
    return kind(buffer, Handle(buffer, world_size), timeout_seconds=20.0)


def empty(kind: str, *shape: int) -> Tensor:
    return torch.empty(shape, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32))


@contextlib.contextmanager
def noted() -> Iterator[list[KernelLaunch]]:
    """Record the launches within the block, on CPU tensors, without running them."""
    launches: list[KernelLaunch] = []

    def run(kernel: Any, *, grid: Any, warmup: bool, **arguments: Any) -> None:
        launches.append((kernel, grid, arguments))

    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(attention_launch, "INTERPRETED", tl.constexpr(True)),
    ):
        yield launches


# -- matmuls -----------------------------------------------------------------------------------------------------------


def _launches(arch: int) -> Iterator[tuple[str, Launch, bool]]:
    """(kind, launch, True if its loads suit the architecture best) for each shipped config, with pointers and TMA."""
    for kind in OPERAND_KINDS:
        for config in fused_configs(arch, kind):
            launch = Launch(
                config.pointer_config.programs_per_sm,
                config.pointer_config,
                kind if kind in ("tf32", "ieee") else "ieee",
            )
            yield kind, launch, config.tma_config is None
            if config.tma_config is not None:
                yield kind, replace(launch, tma_config=config.tma_config), True


def _operands(kind: str, launch: Launch, layout: str) -> tuple[Tensor, Tensor]:
    k = 128 if launch.tma_config else 40 if launch.config.block_k == 16 else 48
    return empty(kind, M, k), empty(kind, k, N).t() if layout == "nn" else empty(kind, N, k)


def _matmul(kernel: str, arch: int, kind: str, launch: KernelLaunch, *words: str) -> Variant:
    _, _, given = launch
    c = given["C"]
    flags = " split_store" * c.SPLITS_STORE + " flatten" * c.FLATTENS_LOOP
    config = f"{c.BLOCK_M}x{c.BLOCK_N}x{c.BLOCK_K} warps {given['num_warps']} stages {given['num_stages']}{flags}"
    how = "tma" if c.TMA else "" if "direct" in words else "pointers"
    return Variant(kernel, " ".join(filter(None, (kind, *words, how, config))), arch, launch, kind != "ieee")


def _sums(arch: int) -> Iterator[Variant]:
    """Every config of both sums, with every epilogue; in bf16 also one-shot, and three products.

    A transposed weight (dX) takes registers with pointer loads only: it appears as a single product where pointers are
    the only way of loading.
    """
    workspace = workspace_of(Workspace)
    for kind, launch, best in _launches(arch):
        if kind == "fp16" and not best:
            continue
        pointers, n, whole = launch.tma_config is None, empty(kind, N), empty(kind, M, N)
        cases = [("", "nt", 1), ("two-shot", "nt", 1)]
        if kind == "bf16":
            cases += [("two-shot", "nn", 3), *[("one-shot", "nt", 1)] * best, *[("", "nn", 3)] * pointers]
            cases += [("", "nn", 1), ("two-shot", "nn", 1)] * (best and pointers)
        for way, layout, products in cases:
            operands = [_operands(kind, launch, layout)] * products
            how: dict[str, Any] = {"workspace": workspace, "launch": launch, "bias": n}
            with noted() as found:
                if way:
                    how |= {"two_shot": way == "two-shot", "residual": whole, "norm_weight": n}
                    gemm_sum.gemm_all_reduce(operands, **how)
                else:
                    gemm_sum.gemm_reduce_scatter(operands, **how)
            kernel = "gemm_all_reduce" if way else "gemm_reduce_scatter"
            yield _matmul(kernel, arch, kind, found[0], layout, f"{products} products" if products > 1 else "", way)


def _gathers(arch: int) -> Iterator[Variant]:
    """Every config, copied and direct; in bf16 also a transposed weight, three weights, W = 1, and no bias."""
    workspace = workspace_of(GatherWorkspace)
    copied = {
        world: Peers(0, world, {"arrivals": no_arrivals(world, 40 * 10**9, torch.device("cpu")), "rank": 0})
        for world in (1, WORLD)
    }
    for kind in ("bf16", "fp16", "fp32"):
        yield Variant("gather_stage", kind, arch, stage_launch(empty(kind, M, 48), workspace, 4), False)
    for kind, launch, _ in _launches(arch):
        plain = [("nt", 1, "", copied[WORLD])]
        direct = Peers(0, WORLD, workspace.arguments())
        cases = plain + [("nt", 1, "direct", direct)] * (launch.tma_config is None)
        if kind == "bf16":
            cases += [(layout, weights, *rest) for layout, weights in (("nn", 1), ("nt", 3)) for _, _, *rest in cases]
            cases += [("nt", 1, "alone", copied[1])] * (launch.tma_config is not None)
            cases += [("nt", 1, "no bias", copied[WORLD])]
        for layout, weights, way, peers in cases:
            x, w = _operands(kind, launch, layout)
            shards = Shards(M, M // peers.world_size, x.shape[1])
            used = [(w, empty(kind, M, N), None if way == "no bias" else empty(kind, N))] * weights
            own, gathered = x[: shards.rows_per_rank], empty(kind, *x.shape)
            found = all_gather_gemm.matmul_launch(own, used, gathered, shards, peers, launch, way == "direct")
            several = f"{weights} weights" if weights > 1 else ""
            yield _matmul("all_gather_gemm", arch, kind, found, layout, several, way)


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(arch: int) -> Iterator[tuple[str, int, int, bool]]:
    """(kind, head dims of q and v, True if rich): bf16 for all head dims, plain and "rich" (with softcap, slopes and
    dropout; rich ones of 64 have the configs of 128); fp16 with different head dims of q and v; fp32 for 128."""
    yield from (("bf16", 64, 64, False), ("bf16", 128, 128, False), ("bf16", 128, 128, True))
    yield from (("bf16", 256, 256, False), ("bf16", 256, 256, True))
    if arch == 90:
        yield "fp16", 192, 128, False
    if arch == 80:  # fp32 variants are the same on all architectures
        yield from (("tf32", 128, 128, False), ("ieee", 128, 128, False))


def _scores(rich: bool, *, dropout: bool = True) -> Any:
    slopes = torch.ones(HEADS) if rich else None
    return to_kernel_terms(
        ScoreParameters(0.125, 30.0 if rich else 0.0, slopes, Dropout(0.1, 1 << 40) if rich and dropout else None)
    )


def _steps(arch: int) -> Iterator[Variant]:
    """Forward and backward of one step. Plain forwards update a state; rich ones, with sinks, return out and lse."""
    whole = TokenRanges((range(SEQ),))
    step = make_step(AttentionMask(SEQ, SEQ, causal=True), whole, whole)
    for kind, head_dim, v_head_dim, rich in _attention(arch):
        q, k, v, grad = (
            empty(kind, 2, SEQ, heads, dim)
            for heads, dim in ((HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, v_head_dim), (HEADS, v_head_dim))
        )
        sums = [torch.empty(2, HEADS, SEQ) for _ in range(2)]
        configs = {
            name: attention_config(name, arch, kind, max(head_dim, v_head_dim), is_plain=not rich)
            for name in ("forward", "queries", "keys")
        }
        how: dict[str, Any] = {"precision": kind if kind in ("tf32", "ieee") else "ieee"}
        with noted() as found:
            if rich:
                sinks = torch.ones(HEADS)
                forward.flash_attention(q, k, v, step, _scores(rich), sinks=sinks, config=configs["forward"], **how)
            else:
                state = torch.empty(2, SEQ, HEADS, v_head_dim), *sums
                forward.flash_forward(q, k, v, step, _scores(rich), state, config=configs["forward"], **how)
            gradients = [torch.empty(x.shape) for x in (q, k, v)]
            how |= {f"{name}_config": configs[name] for name in ("queries", "keys")}
            d_slopes = torch.empty(HEADS) if rich else None
            backward.flash_backward(grad, q, k, v, *sums, *gradients, step, _scores(rich), d_slopes=d_slopes, **how)
        for (name, config), launch in zip(configs.items(), found, strict=True):
            yield _variant(name, arch, kind, (head_dim, v_head_dim), rich, config, launch)


def _variant(
    name: str, arch: int, kind: str, dims: tuple[int, int], rich: bool, config: AttentionConfig, launch: KernelLaunch
) -> Variant:
    # wgmma and tcgen05 need 64 rows, and no matrix unit supports fp32 in full precision.
    units = kind in ("bf16", "fp16") and (config.rows >= 64 or arch == 80)
    size = "/".join(map(str, dict.fromkeys(dims)))
    return Variant(f"attention {name}", f"{kind} {size} {'rich ' * rich}{config}", arch, launch, units)


def _ring(arch: int) -> Iterator[Variant]:
    """Kernels of a ring's forward; rich ones with sinks."""
    workspace = workspace_of(ring_keys.RingWorkspace)
    plan = ring_plan(AttentionMask(WORLD * SEQ, WORLD * SEQ, causal=True), WORLD, TokenLayout("zigzag"))
    for kind in ("bf16", "fp16", "fp32"):
        k = empty(kind, 2, SEQ, KV_HEADS, 128)
        layout = make_keys_layout(plan, 0, k, k)
        yield Variant("ring_stage", kind, arch, ring_keys.stage_launch(k, k, layout, workspace, 4), False)
    yield Variant("ring_relay", "", arch, ring_keys.KeysPuller(layout, workspace).relay_launch(None, None), False)
    for kind, head_dim, v_head_dim, rich in _attention(arch):
        config = attention_config("ring", arch, kind, max(head_dim, v_head_dim), is_plain=not rich)
        q, k = (empty(kind, 2, SEQ, heads, head_dim) for heads in (HEADS, KV_HEADS))
        v, out = (empty(kind, 2, SEQ, heads, v_head_dim) for heads in (KV_HEADS, HEADS))
        launch = ring_forward._make_launch(
            q, out, torch.empty(2, HEADS, SEQ), kv_chunks(plan, 0), _scores(rich), make_keys_layout(plan, 0, k, v),
            workspace, 4, torch.ones(HEADS) if rich else None, kind if kind in ("tf32", "ieee") else "ieee", config,
            range(1),
        )  # fmt: skip
        yield _variant("ring", arch, kind, (head_dim, v_head_dim), rich, config, launch)


def _decode(arch: int) -> Iterator[Variant]:
    """Plain decoding over a dense cache in parts and rich decoding over pages, with few and many rows; fp32 once, as it
    is the same on all architectures."""
    wanted = [("bf16", 64, 16, False), ("bf16", 128, 16, True), ("bf16", 128, 64, False), ("bf16", 256, 64, True)]
    for kind, head_dim, rows, rich in wanted + [("ieee", 128, 16, True)] * (arch == 80):
        config = decode_config(kind, head_dim, rows)
        q, cache = empty(kind, 2, rows // 2, HEADS, head_dim), empty(kind, 16, SEQ, KV_HEADS, head_dim)
        seen, table = torch.empty(2, rows // 2, dtype=torch.int32), torch.empty(2, 16, dtype=torch.int32)
        pages = {"pages": table, "q_positions": seen, "k_indices": table} if rich else {}
        cache, terms = cache if rich else cache[:2], _scores(rich, dropout=False)
        with noted() as found:
            splits = 1 if rich else 2
            decode.flash_decode(q, cache, cache, seen, seen, SEQ, terms, num_splits=splits, config=config, **pages)
        # Few rows do not fill a tile of wgmma or tcgen05, and reading the cache bounds the time anyway.
        units = arch == 80 and kind != "ieee"
        yield Variant("attention decode", f"{kind} {head_dim} {'rich, paged ' * rich}{config}", arch, found[0], units)
        if (head_dim, rich) == (128, False):
            yield Variant("attention decode merge", "64x128", arch, found[1], False)


# -- loss --------------------------------------------------------------------------------------------------------------


def _loss(arch: int) -> Iterator[Variant]:
    """Plain statistics and gradients; capped ones with the sum that label smoothing needs."""
    targets, by_row = torch.empty(M, dtype=torch.int64), [torch.empty(M)] * 4
    for kind, softcap in (("bf16", None), ("bf16", 30.0), ("fp16", None), ("fp32", None)):
        x, terms = empty(kind, M, 4 * N), {"softcap": softcap, "scale": 0.5}
        with noted() as found:
            cross_entropy.fill_statistics(
                torch.empty(M, 4), x, targets, (0, 4 * N), needs_logit_sum=softcap is not None, **terms
            )
            cross_entropy.fill_gradients(x, x, targets, (0, 4 * N), *by_row, **terms)
        for name, launch in zip(("statistics", "gradients"), found, strict=True):
            yield Variant(f"cross entropy {name}", f"{kind}{' capped' * bool(softcap)}", arch, launch, False)


@functools.cache
def all_variants(archs: Sequence[int] = ARCHS) -> list[Variant]:
    """All shipped variants for each architecture; for SAMPLE one variant of each kernel and dtype on sm_90, one without
    a bias, and one of each kernel on the others."""
    if SAMPLE in archs:
        kinds = ((one.kernel, one.name.split(" ")[0], "no bias" in one.name) for one in reversed(all_variants((90,))))
        hopper = dict(zip(kinds, reversed(all_variants((90,))), strict=True))
        others = {(one.kernel, one.arch): one for one in reversed(all_variants((80, 100)))}
        rest = tuple(arch for arch in archs if arch != SAMPLE)
        return [*hopper.values(), *others.values(), *(all_variants(rest) if rest else ())]
    families = (_gathers, _sums, _steps, _ring, _decode, _loss)
    # Two configs with the same pointer loads are one variant.
    named = {(v.kernel, v.arch, v.name): v for family in families for arch in archs for v in family(arch)}
    found = list(named.values())
    order = {kernel: place for place, kernel in enumerate(dict.fromkeys(variant.kernel for variant in found))}
    return sorted(found, key=lambda one: (order[one.kernel], one.arch))
