"""Layout of the words shared by the kernels of all ranks and the host; `signals` defines the protocol.

csrc/cuda/protocol.h has the same numbers: Triton and CUDA kernels use the same workspaces.
"""

# Words of a workspace's `state`, int64, in this rank's private memory.
EPOCH = 0  # calls ended; negative once this rank has given up
ENDED = 1  # programs of this call that have ended
CLOCK = 2  # latest time that a waiting program read
EXPIRED = 3  # the call in which a wait has expired; 0: none; LEFT: the host has ended this rank's part
STOP = 4  # bit s: the host knows that rank s will not arrive, so waits for it end at once
COUNTERS = 16  # from here on: one per row of tiles; zero between calls

LEFT = -1  # less than the number of any call

# Words of the error record, int64. The host may read them once the first is not 0.
ERROR_SET = 0
ERROR_OP = 1
ERROR_CALL = 2
ERROR_RANK = 3
ERROR_TILE = 4  # -1: the wait was for the call to begin, not for a tile
ERROR_SOURCE = 5  # the rank that was waited for
ERROR_ABSENT = 6  # bit s: rank s has not begun the call
ERROR_GAVE_UP = 7  # 1: the source has given up itself
ERROR_WORDS = 8

# A launch passes its index in this list to the kernel, so that an error can name the op.
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

BUFFER_ALIGNMENT = 64  # kernels assume that every rank's buffer has this alignment
DATA_ALIGNMENT = 128  # data begins at a multiple of it: whole cache lines (vector stores need only 16)
# The front of a half, one part in FLAG_SHARE, is reserved for flags: 8 bytes per 512 of data, the smallest tile.
FLAG_SHARE = 64
