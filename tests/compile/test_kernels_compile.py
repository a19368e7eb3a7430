"""Every kernel, dtype and shipped config compiles for sm_80, sm_90 and sm_100, without a GPU.

None spills registers in a hot loop; all fit into shared memory and use the matrix instruction of their architecture.
`make test` compiles a sample with the oldest Triton, `make test-all` with others, and `make test-long` all kernels.
`python -m tests.compile.resources` writes a table of the resources.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import re
from dataclasses import replace
from pathlib import Path

from tests.compile import resources
from tests.compile.resources import INSTALLED, Resources, compiled, measure
from tests.compile.variants import ARCHS, SAMPLE, Variant, all_variants

# The oldest supported version, which torch 2.11 installs on GPU machines, is tested in every session.
OLDEST, NEWEST = "3.6.0", "3.9.0"


@pytest.mark.parametrize(
    ("triton", "arch"),
    [
        (OLDEST, SAMPLE),
        *(pytest.param(version, SAMPLE, marks=pytest.mark.full) for version in (NEWEST, INSTALLED)),
        *(pytest.param(version, arch, marks=pytest.mark.long) for version in (OLDEST, NEWEST) for arch in ARCHS),
    ],
)
def test_every_kernel_compiles(triton: str, arch: int, complaints: list[str]) -> None:
    assert not complaints, "\n".join(complaints)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_a_tile_is_stored_before_its_flag_is_put(kernel: str) -> None:
    """The loop over tiles is flattened with the one over K and pipelined; stores and flags must stay in order.

    In the compiled code a barrier directly precedes every flag. The first flag belongs to the previous tile; the next
    tile's stores follow it, and then another flag.
    """
    variant = next(
        variant
        for variant in all_variants((90,))
        if variant.kernel == kernel
        and variant.name.startswith("bf16 nt")
        and variant.constants.FLATTENS_LOOP
        and variant.constants.BLOCK_N == 256
    )
    asm = compiled(variant).asm
    whole = [m.group(0) for m in re.finditer(r"^( *)(?:%\S+ = )?scf\.for .*?^\1\}", asm["ttgir"], re.M | re.S)]
    (flat,) = [loop for loop in whole if "warp_group_dot " in loop]
    assert "tt.store" in flat and flat.count("scf.for") == 1, "the loops are not one"
    assert "async_tma_copy_global_to_local" in flat and "pendings = 1" in flat, "the loop is not pipelined"
    after = asm["ptx"][asm["ptx"].index("wgmma.mma_async") :]
    events = re.findall(r"st\.global|bar\.sync|st\.release\.sys", after)
    flags = [index for index, event in enumerate(events) if event == "st.release.sys"]
    assert len(flags) > 1
    assert all(events[index - 1] == "bar.sync" for index in flags)
    assert next(event for event in events[flags[0] + 1 :] if event != "bar.sync") == "st.global"


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["gemm_reduce_scatter", "gemm_all_reduce"])
@pytest.mark.parametrize("arch", ARCHS)
def test_all_ranks_are_told_behind_one_fence(kernel: str, arch: int) -> None:
    """A release waits for all stores before it, so one release per rank would notify the last rank W times as late:
    loops over ranks hold none, and only one precedes the first tile. Links need not support atomic operations."""
    variants = [v for v in all_variants((arch,)) if v.kernel == kernel and v.name.startswith("bf16 nt")]
    for variant in variants:
        asm = compiled(variant).asm
        assert not re.search(r"atom\S*\.sys\.release", asm["ptx"]), variant.name
        assert asm["ttgir"].partition("scf.for")[0].count("st.release.sys") == 1, variant.name
        around: list[int] = []  # indents of the loops around a line
        for line in asm["ttgir"].splitlines():
            indent = len(line) - len(line.lstrip())
            around = [one for one in around if one < indent]
            if "scf.for" in line or "scf.while" in line:
                around.append(indent)
            if "st.release.sys" in line:
                assert len(around) <= 1, f"{variant.name}: {line.strip()[:80]}"


@pytest.mark.full
def test_a_ring_loads_no_chunk_before_it_has_waited_for_it() -> None:
    """The pipelined loops over blocks hoist their first loads, but not above the wait for a chunk."""
    variant = next(
        variant
        for variant in all_variants((90,))
        if variant.kernel == "attention ring" and variant.name.startswith("bf16 64 ") and variant.constants.TMA
    )
    lines = compiled(variant).asm["ttgir"].splitlines()

    def depth(line: str) -> int:
        return len(line) - len(line.lstrip())

    at = {
        what: [number for number, line in enumerate(lines) if what in line]
        for what in ("acquire, sys", "fence.proxy.async.global", "async_tma_copy_global_to_local", "scf.for %")
    }
    (fence,), loads = at["fence.proxy.async.global"], at["async_tma_copy_global_to_local"]
    assert max(at["acquire, sys"]) < fence < min(loads)
    # The inner one of the two loops around the wait is that over chunks: all loads are inside it.
    over_chunks = max(number for number in at["scf.for %"] if number < at["acquire, sys"][0])
    assert all(depth(lines[number]) > depth(lines[over_chunks]) for number in loads)


@pytest.mark.full
@pytest.mark.parametrize("arch", [90, 100])
def test_no_tile_of_a_shard_is_loaded_before_the_shard_has_come(arch: int) -> None:
    """A program acquires the shard's flag, then a barrier joins all threads, then a proxy fence precedes the TMA loads,
    which use another proxy."""
    variants = [v for v in all_variants((arch,)) if v.kernel == "all_gather_gemm" and v.name.startswith("bf16 nt tma")]
    for variant in variants:
        _, begin, loop = compiled(variant).asm["ttgir"].partition("scf.while")
        assert begin
        learns, meets, fence, loads = (
            [match.start() for match in re.finditer(what, loop)]
            for what in (
                "acquire, sys",
                r"(?:ttg|gpu)\.barrier",
                "fence.proxy.async.global",
                "async_tma_copy_global_to_local",
            )
        )
        assert len(learns) == 3 and max(learns) < meets[0] < fence[0] < min(loads), variant.name


@pytest.mark.full
def test_what_came_out_is_kept_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = next(variant for variant in all_variants((90,)) if variant.kernel == "ring_relay")
    made = []

    def measured(variant: Variant) -> Resources:
        made.append(variant)
        return Resources(variant.kernel, variant.name, f"sm_{variant.arch}", 32, 0, 0)

    monkeypatch.setattr(resources, "_measured", measured)
    monkeypatch.setattr(resources, "kept", lambda: tmp_path)
    assert measure(variant) == measure(variant) and len(made) == 1
    kernel, grid, arguments = variant.launch
    changed = [replace(variant, launch=(kernel, grid, arguments | more)) for more in ({"WORLD": 7}, {"num_warps": 8})]
    for other in (*changed, replace(variant, arch=80)):
        measure(other)
        assert made[-1] is other
    monkeypatch.setenv("TRITON_SOMETHING", "1")
    measure(variant)
    assert made[-1] is variant and len(made) == 5
