"""The words that kernels of all ranks, and the host, leave for each other; what they mean and order is in `signals`.

csrc/cuda/protocol.h has the same numbers: kernels of both kinds work in the same workspaces.
"""

# Words of a workspace's `state`, int64, in memory of this rank alone.
EPOCH = 0  # calls ended; negative once this rank has given up
ENDED = 1  # programs of this call that have ended
CLOCK = 2  # latest time that a waiting program read
EXPIRED = 3  # the call in which a wait has expired; 0: none; LEFT: the host has ended this rank's part
STOP = 4  # bit s: the host knows that rank s will not come, so no wait for it need last any longer
COUNTERS = 16  # from here on: one per row of tiles; zero between calls

LEFT = -1  # before any call there may be

# Words of the error record, int64. The host may read them once the first is not 0.
ERROR_SET = 0
ERROR_OP = 1
ERROR_CALL = 2
ERROR_RANK = 3
ERROR_TILE = 4  # -1: not a tile but the beginning of the call
ERROR_SOURCE = 5  # the rank that was waited for
ERROR_ABSENT = 6  # bit s: rank s has not begun the call
ERROR_GAVE_UP = 7  # 1: the source has given up itself
ERROR_WORDS = 8

# Launches give their number, so that an error can be named: the index here.
OPS = (
    "barrier",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "all_gather_matmul",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "all_reduce_rms_norm",
    "ring_attention",
)
MAX_WORLD_SIZE = 63  # one bit each in a word of the error record

BUFFER_ALIGNMENT = 64  # memory that a kernel's address arithmetic takes for aligned must be so on every rank
DATA_ALIGNMENT = 128  # data begins at a multiple of it: whole cache lines, and vector stores need 16
# The front of a half that is kept for flags, one part in so many: 8 bytes for each 512 of data, the smallest tile.
FLAG_SHARE = 64
