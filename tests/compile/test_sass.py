"""Detection of hot loops in SASS: only spills in them count."""

from __future__ import annotations

from tests.compile.sass import SPILLS, hot_loops

# A loop over tiles around one over K, whose wait is repeated in a block placed after the kernel's end.
_SASS = """
.text.kernel:
        /*0000*/                   STL [R1], R2 ;
.L_x_tile:
        /*0010*/                   LDL R2, [R1] ;
.L_x_k:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_again) ;
.L_x_go:
        /*0040*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        {between}
        /*0050*/               @P1 BRA `(.L_x_k) ;
        /*0060*/                   STL [R1+0x4], R4 ;
        /*0070*/               @P2 BRA `(.L_x_tile) ;
        /*0080*/                   EXIT ;
.L_x_again:
        /*0090*/                   LDL R9, [R1+0x8] ;
        /*00a0*/                   BRA `(.L_x_go) ;
.L_x_end:
        /*00b0*/                   BRA `(.L_x_end) ;
"""


def opcodes(between: str) -> list[list[str]]:
    return [[opcode.split(".")[0] for _, opcode in loop] for loop in hot_loops(_SASS.replace("{between}", between))]


def test_what_is_not_on_the_steady_path_does_not_count() -> None:
    (loop,) = opcodes("")
    assert sorted(loop) == ["BRA", "BRA", "HGMMA", "SYNCS"]


def test_a_spill_beside_the_product_counts() -> None:
    (loop,) = opcodes("/*0048*/                   LDL.LU R7, [R1+0xc] ;")
    assert sum(opcode.startswith(SPILLS) for opcode in loop) == 1


def test_a_kernel_without_loops_has_none() -> None:
    assert hot_loops("/*0000*/  HMMA.16816.F32 R4, R8, R12, R4 ;\n/*0010*/  EXIT ;") == []
