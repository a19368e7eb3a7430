"""Exceptions for failures between ranks, which the ranks of a group send to each other.

Invalid arguments raise `ValueError` or `TypeError` instead, before anything is sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

_ErrorT = TypeVar("_ErrorT", bound="FusedTPError")
_ERROR_FIELDS = ("op", "call", "group", "rank", "size", "missing", "reason", "cause")


class FusedTPError(RuntimeError):
    """Base class of failures between ranks. Calls on a group that an earlier failure made unusable raise it directly.

    If neither `op`, `group` nor `rank` is set, `sentence` is the message. Otherwise it is a format string with fields
    in braces, so that the message can be rebuilt for another group (`in_parent_group`) and on other ranks (`as_dict`).

    Attributes:
        op: the op that failed; empty if unknown.
        call: number of the call in the group; 0 if unknown.
        group: name of the group.
        rank: the rank that raises; -1 if unknown.
        size: number of ranks in the group.
        missing: ranks that had not arrived or are lost, each with its last known state.
        reason: message of the backend, or of another exception.
        cause: the error of a peer, or an earlier error of this rank, that caused this one.

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
        """Format string of the message; `__str__` fills in its fields."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        if not self.op and not self.group and self.rank < 0:
            return self.sentence
        missing = _describe_ranks(self.missing)
        fields = self._fields() | {"missing": missing, "Missing": missing[0].upper() + missing[1:]}
        return self.sentence.format(**fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ERROR_FIELDS}

    def copy(self: _ErrorT, suffix: str = "", **fields: Any) -> _ErrorT:
        """Return a copy with `fields` replaced and `suffix` appended to the message.

        The copy has no traceback, because that would keep all tensors of its frames alive.
        """
        copied = copy.copy(self)
        copied.args = (self.sentence + suffix,)
        vars(copied).update(fields)
        return copied

    def in_parent_group(self: _ErrorT, group: str, size: int, ranks: Sequence[int]) -> _ErrorT:
        """Convert an error of a subgroup to one of the parent `group`, in which subgroup rank r is rank `ranks[r]`."""
        return self.copy(
            group=group,
            size=size,
            rank=ranks[self.rank] if self.rank >= 0 else -1,
            missing={ranks[rank]: last_state for rank, last_state in self.missing.items()},
            cause=self.cause and self.cause.in_parent_group(group, size, ranks),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the class name and the fields of the error as a dict that JSON can represent."""
        cause = self.cause and self.cause.as_dict()
        return {"class": type(self).__name__, "sentence": self.sentence, **self._fields(), "cause": cause}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> FusedTPError:
        """Restore an error from the result of `as_dict`, in this or another process."""
        fields = dict(content)
        error_class = _ERROR_CLASSES.get(fields.pop("class"), FusedTPError)
        fields["missing"] = {int(rank): last_state for rank, last_state in fields["missing"].items()}
        fields["cause"] = fields["cause"] and FusedTPError.from_dict(fields["cause"])
        return error_class(**fields)


class CollectiveTimeoutError(FusedTPError):
    """A peer did not arrive within `FUSED_TP_TIMEOUT` seconds. The group is unusable afterwards."""


class PeerLostError(FusedTPError):
    """A peer's process died or closed its connection. The group is unusable afterwards: create one without it."""


class RankMismatchError(FusedTPError):
    """The ranks of a group called different ops, or the same op with different shapes, dtypes or keywords.

    All ranks raise it, and the group stays usable.
    """


_ERROR_CLASSES = {kind.__name__: kind for kind in (CollectiveTimeoutError, PeerLostError, RankMismatchError)}


def describe_midway_error(error: BaseException) -> str:
    """Return the end of a message about an op that raised `error` on this rank after its peers had started the op."""
    lines = str(error).splitlines()
    reason = type(error).__name__ + (f" ({lines[0][:300]})" if lines else "")
    return (
        f"raised {reason} midway, after its peers had started the op. The group was aborted, because the next calls "
        "of the ranks would not have matched."
    )


def join_words(words: Iterable[str]) -> str:
    """Join `words` to "1", "1 and 2" or "1, 2 and 3"."""
    *first_words, last_word = words
    return f"{', '.join(first_words)} and {last_word}" if first_words else last_word


def _describe_ranks(missing: Mapping[int, str]) -> str:
    """Describe the missing ranks: "rank 2", or "ranks 1 (last heard of at call 4, all_gather) and 2"."""
    if not missing:
        return "a peer"
    words = [f"{rank} ({last_state})" if last_state else str(rank) for rank, last_state in missing.items()]
    return f"rank{'s' if len(words) > 1 else ''} {join_words(words)}"
