"""Errors that the ranks of a group can give each other.

Bad arguments are not here: they raise `ValueError` or `TypeError` before anything is sent.
"""


class FusedTPError(RuntimeError):
    """Anything that went wrong between ranks. The group is unusable afterwards."""


class CollectiveTimeoutError(FusedTPError):
    """A peer did not arrive within `FUSED_TP_TIMEOUT` seconds."""


class PeerLostError(FusedTPError):
    """A peer's process died or closed its connection."""


class RankMismatchError(FusedTPError):
    """The ranks of a group called different ops, or the same op with different shapes or dtypes."""
