"""Errors that the ranks of a group send each other.

Bad arguments are not among them: they raise `ValueError` or `TypeError` before anything is sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

_ErrorT = TypeVar("_ErrorT", bound="FusedTPError")
_FIELDS = ("op", "call", "group", "rank", "size", "missing", "reason", "cause")


class FusedTPError(RuntimeError):
    """Any failure between ranks. The class itself is raised by calls on a group that an earlier failure made unusable.

    An error with only a sentence prints that sentence unchanged. Any other sentence names the fields in braces, so that
    the error can be restated for another group (`in_ranks_of`) and sent to peers (`as_dict`).

    Attributes:
        op: the op that failed; empty where unknown.
        call: number of the call in the group; 0 where unknown.
        group: name of the group.
        rank: the rank that raises; -1 where unknown.
        size: number of ranks in the group.
        missing: ranks that had not arrived, or are lost, each with its last known state.
        reason: message of the backend, or of another exception.
        cause: the error that caused this one: a peer's, or an earlier one of this rank.

    Example:
        >>> str(PeerLostError("{op} on rank {rank} lost {missing}.", op="all_gather", rank=0, missing={1: ""}))
        'all_gather on rank 0 lost rank 1.'
    """

    def __init__(
        self,
        sentence: str = "",
        *,
        op: str = "",
        call: int = 0,
        group: str = "",
        rank: int = -1,
        size: int = 0,
        missing: Mapping[int, str] | None = None,
        reason: str = "",
        cause: FusedTPError | None = None,
    ) -> None:
        super().__init__(sentence)
        self.op, self.call = op, call
        self.group, self.rank, self.size = group, rank, size
        self.missing = dict(missing or {})
        self.reason = reason
        self.cause = cause

    @property
    def sentence(self) -> str:
        """The sentence with its fields in braces, before `__str__` fills them in."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        if not self.op and not self.group and self.rank < 0:
            return self.sentence
        missing = _named(self.missing)
        fields = self._fields() | {"missing": missing, "Missing": missing[0].upper() + missing[1:]}
        return self.sentence.format(**fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def copy(self: _ErrorT, more: str = "", **fields: Any) -> _ErrorT:
        """A copy without the traceback, which would keep all tensors of its frames alive; `more` extends the text."""
        made = copy.copy(self)
        made.args = (self.sentence + more,)
        vars(made).update(fields)
        return made

    def in_ranks_of(self: _ErrorT, group: str, size: int, ranks: Sequence[int]) -> _ErrorT:
        """The error of a subgroup, restated for its parent `group`; `ranks[r]` is the parent's number of rank r."""
        return self.copy(
            group=group,
            size=size,
            rank=ranks[self.rank] if self.rank >= 0 else -1,
            missing={ranks[rank]: heard for rank, heard in self.missing.items()},
            cause=self.cause and self.cause.in_ranks_of(group, size, ranks),
        )

    def as_dict(self) -> dict[str, Any]:
        """Class and fields of the error, for JSON."""
        cause = self.cause and self.cause.as_dict()
        return {"class": type(self).__name__, "sentence": self.sentence, **self._fields(), "cause": cause}

    @staticmethod
    def from_dict(told: Mapping[str, Any]) -> FusedTPError:
        """Restore an error from `as_dict` of this or another process."""
        fields = dict(told)
        kind = _CLASSES.get(fields.pop("class"), FusedTPError)
        fields["missing"] = {int(rank): heard for rank, heard in fields["missing"].items()}
        fields["cause"] = fields["cause"] and FusedTPError.from_dict(fields["cause"])
        return kind(**fields)


class CollectiveTimeoutError(FusedTPError):
    """A peer did not arrive within `FUSED_TP_TIMEOUT` seconds. The group is unusable afterwards."""


class PeerLostError(FusedTPError):
    """A peer's process died or closed its connection. The group is unusable afterwards; make one of the other ranks."""


class RankMismatchError(FusedTPError):
    """The ranks of a group called different ops, or the same op with different shapes, dtypes or keywords.

    All of them raise it, and are in step again for their next call.
    """


_CLASSES = {kind.__name__: kind for kind in (CollectiveTimeoutError, PeerLostError, RankMismatchError)}


def raised_midway(error: BaseException) -> str:
    """Describe an op in which this rank raised after its peers had taken part: the rest of a sentence."""
    said = str(error).splitlines()
    reason = type(error).__name__ + (f" ({said[0][:300]})" if said else "")
    return (
        f"raised {reason} half-way, when its peers had taken part in it: from there on the ranks would have been out "
        "of step."
    )


def listed(words: Iterable[str]) -> str:
    """ "1", "1 and 2", "1, 2 and 3"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _named(missing: Mapping[int, str]) -> str:
    """ "rank 2", or "ranks 1 (last heard of at call 4, all_gather) and 2"."""
    if not missing:
        return "a peer"
    words = [f"{rank} ({heard})" if heard else str(rank) for rank, heard in missing.items()]
    return f"rank{'s' if len(words) > 1 else ''} {listed(words)}"
