"""Spilled registers in the hot loops of compiled kernels, read from their SASS.

A hot loop is the shortest cycle of instructions through a matrix instruction: the path of the steady state. It excludes
blocks that run only when a wait is repeated, and code before and after a loop. A spill outside costs once per tile, a
spill in a hot loop costs in every step.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from pathlib import Path

MATRIX = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCMMA")
SPILLS = ("STL", "LDL")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(\w[\w.]*)(.*?);")
_LABEL = re.compile(r"^\s*(\.L_\w+):")


def spills_in_hot_loops(cubin: bytes) -> int:
    """Number of instructions in hot loops that spill a register or load one back."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(triton.knobs.nvidia.nvdisasm.path), "-c", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return len({place for loop in hot_loops(sass) for place, opcode in loop if opcode.startswith(SPILLS)})


def hot_loops(sass: str) -> list[list[tuple[int, str]]]:
    """(number, opcode) of the instructions of the shortest cycle through each block with a matrix instruction."""
    opcodes, after = _flow(sass)
    # fp32 in full precision is multiplied by FFMA, which also serves other arithmetic.
    matrix = MATRIX if any(opcode.startswith(MATRIX) for opcode in opcodes) else ("FFMA",)
    jumps = [place for place, of in enumerate(after) if of != [place + 1]]
    starts = {0, *(place + 1 for place in jumps), *(to for place in jumps for to in after[place])}
    leaders = sorted(starts - {len(opcodes)})
    block_of, ends = {}, {}
    for begin, end in zip(leaders, [*leaders[1:], len(opcodes)], strict=True):
        block_of[begin], ends[begin] = range(begin, end), end - 1
    found = []
    for begin, block in block_of.items():
        if any(opcodes[i].startswith(matrix) for i in block) and (
            cycle := _shortest_cycle(begin, block_of, ends, after)
        ):
            found.append([(i, opcodes[i]) for leader in cycle for i in block_of[leader]])
    return found


def _flow(sass: str) -> tuple[list[str], list[list[int]]]:
    """Opcodes, and for each the numbers of the instructions that may follow it."""
    lines: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := _LINE.match(line):
            lines.append((found[1] or "", found[2], found[3]))
    after, meets = [], {}
    for place, (predicate, opcode, operands) in enumerate(lines):
        name, target = opcode.split(".")[0], re.search(r"\.L_\w+", operands)
        to = [labels[target[0]]] if target and target[0] in labels else []
        register = re.search(r"\bB\d+\b", operands)
        if name == "BSSY" and register:
            meets[register[0]] = to
        conditional = bool(predicate) or re.match(r"\s*(!?U?P\d|!?UP\w+)\s*,", operands)  # BRA P0, `(.L_x)
        follows = [place + 1] if place + 1 < len(lines) else []
        if name == "BRA":
            after.append([*to, *(follows if conditional or (".U" in opcode and "UP" in operands) else [])])
        elif name == "BSYNC" and register:
            after.append([*meets.get(register[0], []), *(follows if predicate else [])])
        elif name in ("EXIT", "RET", "KILL"):
            after.append(follows if predicate else [])
        else:
            after.append(follows)
    return [opcode for _, opcode, _ in lines], after


def _shortest_cycle(
    start: int, block_of: dict[int, range], ends: dict[int, int], after: list[list[int]]
) -> list[int] | None:
    """Leaders of the blocks of the cycle through `start` with the fewest instructions; None if there is none."""
    came_from: dict[int, int] = {}
    queue = [(len(block_of[start]), start, start)]
    while queue:
        length, block, before = heapq.heappop(queue)
        if block in came_from:
            continue
        came_from[block] = before
        for to in after[ends[block]]:
            if to == start:
                cycle = [start]
                while block != start:
                    cycle.append(block)
                    block = came_from[block]
                return cycle
            if to not in came_from:
                heapq.heappush(queue, (length + len(block_of[to]), to, block))
    return None
