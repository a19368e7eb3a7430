"""How kernels, or copy engines, and the messages of their group fail together, and what is raised between two calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from fused_tp.runtime.errors import RankMismatchError, raised_half_way
from fused_tp.schedules.plain import Plain
from fused_tp.transport.failure import Call


@contextmanager
def gives_up_half_way(
    op: str, calls: Callable[[], int], give_up: Callable[[str], None], plain: Plain | None
) -> Iterator[None]:
    """Around calls that make `op` together.

    Kernels do not compare what the ranks call. One that raises between two calls and goes on, with the next batch say,
    would have its next call taken for the one that its peers wait in, and the numbers of all would be wrong. So it
    gives the group up. Peers hear of it at once, whether they wait for its messages or in a kernel.

    Args:
        calls: how many have been made.
        give_up: makes this rank's later calls fail, with this sentence.
        plain: what runs the calls that go by messages, if there is any.
    """
    before = calls()
    try:
        with nullcontext() if plain is None else plain.abort_scope(op):
            yield
    except RankMismatchError:  # which all ranks raise together
        raise
    except BaseException as error:
        # What is being captured has not run: no peer has had a part of it.
        if calls() != before and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            if plain is not None and plain.transport.broken is None:
                plain.transport.raised_half_way(Call(op, plain.transport.calls, time.perf_counter()), error)
            give_up(f"{op} {raised_half_way(error)}")
        elif plain is not None and plain.transport.broken is not None:  # all of it went by messages
            give_up(plain.transport.broken)
        raise


def ends_messages(plain: Plain | None) -> Callable[[str], str | None]:
    """What the kernels of a group call once they have failed: peers may be waiting for messages, and hear of it.

    Returns what a peer has said that gave the group up before, if one has.
    """

    def end(sentence: str) -> str | None:
        if plain is None:
            return None
        said = plain.transport.said_by_peer()
        plain.transport.end(sentence)
        return said

    return end


def refuse_broken(plain: Plain | None) -> None:
    """Raises where messages of the group have failed: its ranks may no longer mean the same call of a kernel."""
    if plain is not None and plain.transport.broken is not None:
        raise plain.transport.unusable()
