"""Triton's interpreter without two things that take most of its time and are of no use to tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def quicken(_group: object = None) -> None:
    """Makes this process, which interprets kernels and never compiles one, interpret them in a third of the time.

    Triton searches all of triton.language, at every call of a @jit function, those inside of kernels too, for what to
    replace by its interpreter's own, and after a launch puts back what it replaced before: here it stays replaced.
    And it computes every sum and product of integers a second time, in 64 bits, to see whether it overflows: sizes in
    tests are far from that.
    """
    from triton.runtime import interpreter

    search: Callable[[Any], Any] = interpreter._patch_lang
    searched = set()

    def search_once(fn: Any) -> Any:
        if id(fn.__globals__) not in searched:
            searched.add(id(fn.__globals__))
            search(fn)
        return interpreter._LangPatchScope()  # has nothing to put back

    interpreter._patch_lang = search_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
