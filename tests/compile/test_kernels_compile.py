"""Every kernel, dtype and shipped config compiles for sm_80, sm_90 and sm_100, where there is no GPU.

And it spills no register, fits into shared memory, and multiplies by the matrix instruction of its architecture.
`python -m benchmarks.kernel_resources` writes what is checked here to a table.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton_kernels.resources import all_variants, measure_all


def test_every_kernel_compiles_for_every_architecture() -> None:
    results = measure_all()
    assert len(results) == len(all_variants())
    wrong = [result if isinstance(result, str) else result.complaint for result in results]
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert {result.arch for result in results if not isinstance(result, str)} == {80, 90, 100}


def test_names_of_variants_are_unique() -> None:
    names = [(variant.kernel, variant.arch, variant.name) for variant in all_variants()]
    assert len(set(names)) == len(names)
