"""What a case is: contestants, how each is compared with fused_tp, and how their answers are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ranks import RankContext
from .ratios import Measure

OURS = "fused_tp"

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Of the largest number in the expected answer. A sum of terms rounded apart differs by about one step of the dtype from
# one rounded once; the bound is what tells a wrong answer from another rounding, not a test of accuracy.
TOLERANCES = {torch.bfloat16: 0.03, torch.float32: 1e-4}


class Unavailable(Exception):
    """A contestant cannot run here; the message says why in a sentence."""


@dataclass
class Contestant:
    """One way of doing the work of a case.

    Attributes:
        run: does it once. What it returns is dropped within the timed span, as freeing is part of the cost.
        check: raises AssertionError if what run() computes is wrong; None for a floor that computes only a part.
        note: goes into the record.
    """

    run: Callable[[], Any]
    check: Callable[[], None] | None = None
    note: str = ""


# Makes a contestant on a rank, all ranks alike. Raises Unavailable, or ImportError where a package is missing.
Maker = Callable[[], Contestant]


@dataclass(frozen=True)
class Rival:
    """Who fused_tp is compared with, and how; `bar` and `aim` are values of `measure`."""

    measure: Measure
    bar: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        name: family/dtype/size, unique.
        make: called on each rank as make(context, **parameters); must be of the top level of a module.
        rivals: by contestant's name; contestants that are not here are shown with their times only.
        seconds: about how long all rounds together should take.
    """

    name: str
    make: Callable[..., dict[str, Maker]]
    parameters: Mapping[str, Any]
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    seconds: float = 10.0

    @property
    def family(self) -> str:
        """Cases of one family share their ranks, one after the other."""
        return self.name.split("/")[0]

    def makers(self, context: RankContext) -> dict[str, Maker]:
        return self.make(context, **self.parameters)


def checked(run: Callable[[], Tensor], expected: Tensor, note: str = "") -> Contestant:
    """A contestant whose answer must be `expected`, to within the rounding of its dtype."""

    def check() -> None:
        assert_close(run(), expected)

    return Contestant(run, check, note)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError where `actual` is further from `expected` than rounding in its dtype explains."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs().max().item()
    bound = TOLERANCES[actual.dtype] * expected.double().abs().max().item()
    assert error <= bound, f"off by up to {error:.3g}, where {bound:.3g} is allowed"
