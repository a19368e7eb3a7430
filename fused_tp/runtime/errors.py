"""Errors that the ranks of a group can give each other.

Bad arguments are not here: they raise `ValueError` or `TypeError` before anything is sent.
"""


class FusedTPError(RuntimeError):
    """Anything that went wrong between ranks; itself: a call on a group that is unusable since an earlier failure."""


class CollectiveTimeoutError(FusedTPError):
    """A peer did not arrive within `FUSED_TP_TIMEOUT` seconds. The group is unusable afterwards."""


class PeerLostError(FusedTPError):
    """A peer's process died or closed its connection. The group is unusable afterwards: make one of the others."""


class RankMismatchError(FusedTPError):
    """The ranks of a group called different ops, or the same op with different shapes, dtypes or keywords.

    All of them raise it, and are in step again for their next call.
    """


def raised_half_way(error: BaseException) -> str:
    """What happened to an op that peers had had a part of when this rank raised: the rest of a sentence."""
    said = str(error).splitlines()
    reason = type(error).__name__ + (f" ({said[0][:300]})" if said else "")
    return (
        f"raised {reason} half-way, when its peers had taken part in it: from there on the ranks would have been out "
        "of step."
    )
