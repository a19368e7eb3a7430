"""Every compilation of a Triton kernel that launches may ask for: kernels x dtypes x configs x architectures, W = 8.

fp16 and bf16 differ in the name of a type, so fp16 is compiled the way that its architecture loads best, once per
kernel and config. By pointers K is odd, since masks along K take registers; by TMA there are none. Layouts as BLAS
names them: `nt` x [M, K] and weight [N, K] as they lie, `nn` weight transposed (dX), `tn` both (dW).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fused_tp.triton_kernels.attention import backward, blocks, decode, forward, ring_forward, ring_keys
from fused_tp.triton_kernels.attention.configs import AttentionConfig, attention_config, decode_config, padded
from fused_tp.triton_kernels.attention.launch import constants
from fused_tp.triton_kernels.comm import gather
from fused_tp.triton_kernels.comm.workspace import WorkspaceArguments
from fused_tp.triton_kernels.gemm import all_gather_gemm, gemm, gemm_all_reduce, gemm_reduce_scatter
from fused_tp.triton_kernels.gemm.configs import KINDS, GemmConfig, fused_configs, gemm_configs
from fused_tp.triton_kernels.gemm.launch import OPERANDS, Launch, LoadPlan, by_pointers, sum_constants
from fused_tp.triton_kernels.gemm.tiles import Matrix, Sizes

WORLD = 8
ARCHS = (80, 90, 100)
SAMPLE = 0  # in the place of an architecture: some of sm_90, which take half a minute
WS = {"ws": WorkspaceArguments("*i64", "*i64", "*i64", "i64", "i64"), "rank": "i32", "WORLD": WORLD}


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    `arguments` has all of them by name: constexprs as they are; of the others a type as Triton writes it ("*bf16",
    "i32", "tensordesc<bf16[128, 64]>"), 1 or None where the launch would make a constant of that, or a tuple of these.
    Pointers and integers are taken for multiples of 16, as Triton finds aligned tensors and round sizes to be, but for
    those that the kernel does not specialize.
    """

    kernel: str
    name: str
    arch: int
    function: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    matrix_instruction: bool = True  # whether it must multiply by that of its architecture


# -- matmuls -----------------------------------------------------------------------------------------------------------


def _element(kind: str) -> str:
    return "fp32" if kind in ("tf32", "ieee") else kind


def _operand(element: str, tma: bool, rows: int, columns: int, swapped: bool = False) -> str:
    block = f"{columns}, {rows}" if swapped else f"{rows}, {columns}"
    return f"tensordesc<{element}[{block}]>" if tma else f"*{element}"


def _strides(swapped: bool) -> tuple[Any, Any]:
    return (1, "i32") if swapped else ("i32", 1)


def _gemm(arch: int) -> Iterator[Variant]:
    """Every kind, config and layout of `gemm`, as they lie with bias."""
    for kind in KINDS:
        for tma in (True, False):
            if kind == "fp16" and tma != (arch >= 90):
                continue
            for config in gemm_configs(arch, kind, tma=tma):
                for layout in ("nt", "nn", "tn"):
                    # By TMA, gemm transposes 16-bit operands only.
                    if layout == "nt" or kind == "bf16" or (not tma and kind != "fp16"):
                        yield _gemm_variant(arch, kind, tma, config, layout)


def _gemm_variant(arch: int, kind: str, tma: bool, config: GemmConfig, layout: str) -> Variant:
    element, x_swapped, w_swapped = _element(kind), layout[0] == "t", layout[1] == "n"
    plan = LoadPlan((config,), tma, "", x_swapped, w_swapped)
    half = config.block_n // 2 if config.split_store else config.block_n
    arguments = {
        "x": _operand(element, tma, config.block_m, config.block_k, x_swapped),
        "w": _operand(element, tma, config.block_n, config.block_k, w_swapped),
        "y": _operand(element, True, config.block_m, half) if tma else Matrix(f"*{element}", "i32"),
        "bias_ptr": f"*{element}",
        "sizes": Sizes("i32", _strides(x_swapped), _strides(w_swapped)),
        **dict.fromkeys("MN", "i32"),
        "C": plan.constants(kind if element == "fp32" else "ieee", even_k=tma),
    }
    name = f"{kind} {layout} {'tma' if tma else 'pointers'} {config}"
    return Variant("gemm", name, arch, gemm.gemm_kernel, arguments, config.options(), kind != "ieee")


def _launches(arch: int) -> Iterator[tuple[str, Launch, bool]]:
    """(kind, launch, whether by TMA) of what is shipped beside collectives."""
    for kind in KINDS:
        for config in fused_configs(arch, kind):
            precision = kind if _element(kind) == "fp32" else "ieee"
            launch = Launch(config.programs_per_sm, config.pointers, precision, tma_config=config.tma)
            for tma in (False, True) if config.tma else (False,):
                yield kind, launch, tma


def _sum(
    kernel: str,
    function: Any,
    arch: int,
    kind: str,
    launch: Launch,
    tma: bool,
    arguments: Mapping[str, Any],
    *,
    way: str = "",
    layout: str = "nt",
    products: int = 1,
) -> Variant:
    """A matmul that ends in a sum over ranks."""
    element, x_swapped, w_swapped = _element(kind), layout[0] == "t", layout[1] == "n"
    config = launch.tma_config if tma else by_pointers(launch, products)
    assert config is not None
    operands: dict[str, Any] = dict.fromkeys(OPERANDS)
    for i in range(products):
        operands[f"x{i}"] = _operand(element, tma, config.block_m, config.block_k, x_swapped)
        operands[f"w{i}"] = _operand(element, tma, config.block_n, config.block_k, w_swapped)
    plan = LoadPlan((config,), tma, "", x_swapped, w_swapped)
    c = sum_constants(launch, plan, 4 if element == "fp32" else 2, products, tma, way != "one-shot")
    several = f"{products} products" if products > 1 else ""
    name = " ".join(filter(None, [kind, layout, several, way, "tma" if tma else "pointers", str(config)]))
    common = {
        **operands,
        **WS,
        "sizes": (Sizes("i32", _strides(x_swapped), _strides(w_swapped)),) * products,
        "bias_ptr": f"*{element}",
        "out": Matrix(f"*{element}", "i32"),
        **dict.fromkeys("MN", "i32"),
        "terms_offset": "i64",
        "C": c,
    }
    return Variant(kernel, name, arch, function, {**common, **arguments}, config.all_registers(), kind != "ieee")


def _gemm_reduce_scatter(arch: int) -> Iterator[Variant]:
    """Every config, with a bias; in bf16 also the sum of three products with transposed weights (dX)."""
    for kind, launch, tma in _launches(arch):
        if kind == "fp16" and tma != bool(launch.tma_config):
            continue
        cases = [("nt", 1)]
        if kind == "bf16" and not tma:
            cases += [("nn", 3)] if launch.tma_config else [("nn", 3), ("nn", 1)]
        for layout, products in cases:
            yield _sum(
                "gemm_reduce_scatter", gemm_reduce_scatter.gemm_reduce_scatter_kernel, arch, kind, launch, tma,
                {"rows_per_rank": "i32"}, layout=layout, products=products,
            )  # fmt: skip


def _gemm_all_reduce(arch: int) -> Iterator[Variant]:
    """Every config two-shot, with all that may follow the sum; in bf16 also one-shot, multimem and three products.

    A transposed weight costs registers by pointers only, so it is there where they are the only way.
    """
    for kind, launch, tma in _launches(arch):
        best = tma == bool(launch.tma_config)
        if kind == "fp16" and not best:
            continue
        cases = [("two-shot", "nt", 1)]
        if kind == "bf16":
            cases.append(("two-shot", "nn", 3))
            if best:
                cases.append(("one-shot", "nt", 1))
                cases.append(("multimem", "nt", 1) if tma else ("two-shot", "nn", 1))
        element = _element(kind)
        for way, layout, products in cases:
            arguments = {
                **dict.fromkeys(("residual", "normed"), Matrix(f"*{element}", "i32")),
                "norm_weight_ptr": f"*{element}",
                "eps": "fp32",
                **dict.fromkeys(("multicast", "sums_offset"), "i64"),
                "TWO_SHOT": way != "one-shot",
                "MULTIMEM": way == "multimem",
            }
            function = gemm_all_reduce.gemm_all_reduce_kernel
            yield _sum(
                "gemm_all_reduce", function, arch, kind, launch, tma, arguments,
                way=way, layout=layout, products=products,
            )  # fmt: skip


def _all_gather_gemm(arch: int) -> Iterator[Variant]:
    """Every config copied and direct; in bf16 also the weight transposed, three weights, and W = 1."""
    for element in ("bf16", "fp16", "fp32"):
        stage = {**dict.fromkeys(("rows", "K"), "i32"), "x_ptr": f"*{element}", "strides": ("i32", 1)}
        yield Variant("gather_stage", element, arch, gather.stage_kernel, stage | WS, {}, False)
        relay = dict.fromkeys(("K", "copied", "first_row", "rows", "awaited"), "i32")
        arguments = {"gathered_ptr": f"*{element}"} | relay | WS
        yield Variant("gather_relay", element, arch, gather.relay_kernel, arguments, {"num_warps": 1}, False)
    for kind, launch, tma in _launches(arch):
        for direct in (False,) if tma else (False, True):
            for layout, weights in (("nt", 1), ("nn", 1), ("nt", 3)) if kind == "bf16" else (("nt", 1),):
                yield _all_gather_variant(arch, kind, launch, tma, direct, layout, weights)
            if kind == "bf16" and tma:
                yield _all_gather_variant(arch, kind, launch, tma, direct, "nt", 1, world=1)


def _all_gather_variant(
    arch: int, kind: str, launch: Launch, tma: bool, direct: bool, layout: str, weights: int, world: int = WORLD
) -> Variant:
    element, w_swapped = _element(kind), layout == "nn"
    config = launch.tma_config if tma else all_gather_gemm.by_pointers(launch.config)
    assert config is not None
    x = _operand(element, tma, config.block_m, config.block_k)
    w = _operand(element, tma, config.block_n, config.block_k, w_swapped)
    weight = all_gather_gemm.Weight(f"*{element}", f"*{element}", "i32", _strides(w_swapped))
    plan = LoadPlan((config,), tma, "", False, w_swapped)
    arguments = {
        "x_own": x,
        "x": None if direct else x,
        **{f"w{i}": w if i < weights else None for i in range(all_gather_gemm.MAX_WEIGHTS)},
        "weights": (weight,) * weights,
        "gathered_ptr": f"*{element}" if direct else None,
        **dict.fromkeys(("M", "K", "rows_per_rank"), "i32"),
        **WS,
        "WORLD": world,
        "DIRECT": direct,
        "LAST": True,
        "C": all_gather_gemm.gather_constants(launch, plan, weights, tma),
    }
    how = ("tma" if tma else "direct" if direct else "pointers") + (" alone" if world == 1 else "")
    name = f"{kind} {layout} {f'{weights} weights ' if weights > 1 else ''}{how} {config}"
    function = all_gather_gemm.all_gather_gemm_kernel
    return Variant("all_gather_gemm", name, arch, function, arguments, config.all_registers(), kind != "ieee")


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(kernel: str, arch: int, function: Any, more: Callable[..., Mapping[str, Any]]) -> Iterator[Variant]:
    """bf16 for all head dims, plain and "rich": with softcap, slopes, dropout and fewer heads of keys; rich ones of 64
    have the configs of 128. fp16 once per kernel, with a head dim of v that is not that of q; fp32 in 128.

    `more(kind, rich, dtype)`: the arguments of this kernel alone.
    """
    wanted = [("bf16", 64, 64, False), ("bf16", 128, 128, False), ("bf16", 128, 128, True)]
    wanted += [("bf16", 256, 256, False), ("bf16", 256, 256, True)]
    if arch == 90:
        wanted.append(("fp16", 192, 128, False))
    if arch == 80:  # those of fp32 are the same everywhere
        wanted += [("tf32", 128, 128, False), ("ieee", 128, 128, False)]
    for kind, head_dim, v_head_dim, rich in wanted:
        config = attention_config(kernel, arch, kind, max(head_dim, v_head_dim), plain=not rich)
        dtype = _element(kind)
        given: dict[str, Any] = {
            **dict.fromkeys(("q", "k", "v", "grad_out"), blocks.Heads(f"*{dtype}", ("i32",) * 3)),
            **dict.fromkeys(("k_tma", "q_tma"), _rows_descriptor(dtype, config, head_dim)),
            **dict.fromkeys(("v_tma", "grad_tma"), _rows_descriptor(dtype, config, v_head_dim)),
            **dict.fromkeys(("dq", "dk", "dv"), blocks.Heads("*fp32", ("i32",) * 3)),
            **dict.fromkeys(("lse", "sums"), blocks.Heads("*fp32", ("i32",) * 2)),
            "d_slopes": "*fp32" if rich else None,
            "mask": blocks.Mask(*("*i32",) * 5),
            "scores": blocks.ScoreArguments("*fp32" if rich else None, "fp32", "fp32", "fp32"),
            "tiles": "*i32",
            **dict.fromkeys(blocks.ODD, "i32"),
            **WS,
        }
        given |= more(rich, dtype)
        how = {"capped": rich, "alibi": rich, "dropout": rich, "tma": config.tma, "first": rich and kernel == "forward"}
        precision = kind if dtype == "fp32" else "ieee"
        given["C"] = constants(config, head_dim, v_head_dim, precision, **how)
        dims = str(head_dim) + (f"/{v_head_dim}" if v_head_dim != head_dim else "")
        name = f"{kind} {dims} {'rich ' if rich else ''}{config}"
        # wgmma and tcgen05 take 64 rows, and fp32 in full precision has no matrix unit.
        units = dtype != "fp32" and (config.rows >= 64 or arch == 80)
        arguments = {name: given[name] for name in function.arg_names}
        yield Variant(f"attention {kernel}", name, arch, function, arguments, config.options(), units)


def _rows_descriptor(dtype: str, config: AttentionConfig, width: int) -> str | None:
    return f"tensordesc<{dtype}[1, 1, {config.block}, {padded(width)}]>" if config.tma else None


def _flash_forward(arch: int) -> Iterator[Variant]:
    """Plain ones from and to a state, the others from none to out and lse."""
    sums = blocks.Heads("*fp32", ("i32",) * 2)
    state = forward.StateArguments(blocks.Heads("*fp32", ("i32",) * 3), sums, sums)

    def more(rich: bool, dtype: str) -> dict[str, Any]:
        if rich:
            return {"state": None, "out": blocks.Heads(f"*{dtype}", ("i32",) * 3), "sinks": "*fp32"}
        return {"state": state, "out": None, "lse": None, "sinks": None}

    yield from _attention("forward", arch, forward.forward_kernel, more)


def _flash_backward(arch: int) -> Iterator[Variant]:
    for kernel, function in (("queries", backward.queries_kernel), ("keys", backward.keys_kernel)):
        yield from _attention(kernel, arch, function, lambda rich, dtype: {})


def _ring(arch: int) -> Iterator[Variant]:
    """The kernels of a forward, the rich ones with sinks."""
    for element in ("bf16", "fp16", "fp32"):
        heads = blocks.Heads(f"*{element}", ("i32",) * 3)
        stage = {"k": heads, "v": heads, "own": f"*{element}", "unneeded": "i64"}
        stage |= dict.fromkeys(("rows", "heads", "pairs", "per_group"), "i32")
        stage |= dict.fromkeys(("D", "DV", "PADDED_D", "PADDED_DV"), 128)
        yield Variant("ring_stage", element, arch, ring_keys.stage_kernel, stage | WS, {}, False)
    relay = dict.fromkeys(("group", "chunk", "source", "last", "awaited", "freed"), "i32")
    yield Variant("ring_relay", "", arch, ring_keys.relay_kernel, relay | WS, {"num_warps": 1}, False)

    def more(rich: bool, dtype: str) -> dict[str, Any]:
        return {
            "out": blocks.Heads(f"*{dtype}", ("i32",) * 3),
            "sinks": "*fp32" if rich else None,
            "tables": ring_forward.Tables(*("*i32",) * 3),
            **dict.fromkeys(ring_forward.RING_ODD, "i32"),
        }

    yield from _attention("ring", arch, ring_forward.ring_kernel, more)


def _flash_decode(arch: int) -> Iterator[Variant]:
    """Plain over a dense cache and rich over pages, in few rows and in many; fp32 once: it is the same everywhere."""
    wanted = [("bf16", 64, 16, False), ("bf16", 128, 16, True), ("bf16", 128, 64, False), ("bf16", 256, 64, True)]
    found = blocks.Heads("*fp32", ("i32",) * 3)
    odd = dict.fromkeys(decode.ODD, "i32")
    parts = decode.Parts(*("*fp32",) * 3)
    for kind, head_dim, rows, rich in wanted + ([("ieee", 128, 16, True)] if arch == 80 else []):
        config, dtype = decode_config(kind, head_dim, rows), _element(kind)
        arguments: dict[str, Any] = {
            **dict.fromkeys("qkv", blocks.Heads(f"*{dtype}", ("i32",) * 3)),
            **dict.fromkeys(("starts", "stops"), "*i32"),
            **dict.fromkeys(("pages", "places", "k_indices"), "*i32" if rich else None),
            "scores": blocks.ScoreArguments("*fp32" if rich else None, "fp32", "fp32", "fp32"),
            "parts": None if rich else parts,
            "found": found if rich else None,
            **odd,
            "C": constants(config, head_dim, head_dim, "ieee", capped=rich, alibi=rich),
        }
        name = f"{kind} {head_dim} {'rich, paged ' if rich else ''}{config}"
        # Few rows fill no tile of wgmma and tcgen05, and the cache's bytes bound it.
        units = arch == 80 and kind != "ieee"
        yield Variant("attention decode", name, arch, decode.parts_kernel, arguments, config.options(), units)
    arguments = {
        "parts": parts,
        "found": found,
        **odd,
        "C": constants(decode_config("bf16", 128, 64), 128, 128, "ieee"),
    }
    arguments = {name: arguments[name] for name in decode.merge_kernel.arg_names}
    yield Variant("attention decode merge", "64x128", arch, decode.merge_kernel, arguments, {"num_warps": 8}, False)


@functools.cache
def all_variants(archs: Sequence[int] = ARCHS) -> list[Variant]:
    """What all families of kernels ship, for each architecture; for SAMPLE one variant of each kernel and dtype."""
    if SAMPLE in archs:
        hopper = {(one.kernel, one.name.split(" ")[0]): one for one in reversed(all_variants((90,)))}
        return [*hopper.values(), *(all_variants(rest) if (rest := tuple(a for a in archs if a != SAMPLE)) else ())]
    families = (_gemm, _all_gather_gemm, _gemm_reduce_scatter, _gemm_all_reduce)
    families += (_flash_forward, _flash_backward, _ring, _flash_decode)
    return [variant for family in families for arch in archs for variant in family(arch)]
