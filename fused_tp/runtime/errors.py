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
