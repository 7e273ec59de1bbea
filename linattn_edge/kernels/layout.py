"""The memory block of one state: an int64 header, positions, S, z and scratch, in that order, 64-byte aligned.

One block is one argument to a compiled step, one copy to fork a stream. No Numba here: `state.py` lays blocks out,
the kernels read them. S is [B, N, F, VP] with the value width padded to VP, a multiple of `NARROW` columns.
"""

# int64 header fields
B, H, HK, N, K, V, F, VP = range(8)  # sizes: streams, query heads, key heads, state heads, widths, padded V
RULE, MAP = 8, 9  # which loop, which feature map
NORMALIZE, QK_NORM, EPS_ADD, CONSTANT_DECAY = 10, 11, 12, 13  # 0 or 1
TAKES_DECAY, TAKES_BETA = 15, 16
AT_POSITION, AT_S, AT_Z, AT_WORK, END = 17, 18, 19, 20, 21  # byte offsets
SCALE, EPS = 22, 23  # float64, stored as their bits
HEADER = 32

NARROW = 8  # columns of S come in multiples of this
WIDE = 32  # columns handled at once where V allows
PIECE = 64  # tokens packed together in a prefill
WORK_BYTES = 1 << 18  # a prefill's scratch stays near this, in cache
WORTH_SHARING = 1 << 20  # bytes of state, times tokens, from which a call may ask for helpers: waking one costs some µs

HALVES = ("float16", "bfloat16")  # state dtypes that are computed in float32

# what a call does
WRITE, READ, STEP = 1, 2, 3

# what a compiled entry returns; anything but OK means that nothing was changed
OK, REFUSED = 0, 1


def padded(V: int) -> int:
    """V rounded up to whole lanes."""
    return -(-V // NARROW) * NARROW


def work_size(piece: int, H: int, N: int, K: int, F: int, VP: int) -> int:
    """Numbers of scratch that `piece` tokens of one state head need; see `regions` in cpu.py."""
    r = max(1, H // N)
    return piece * (F * (4 + r) + VP * (1 + r) + 2 + r) + K + F * WIDE


def piece_length(H: int, N: int, K: int, F: int, VP: int, itemsize: int) -> int:
    """Tokens packed together so that the scratch stays in cache."""
    per_token = (work_size(2, H, N, K, F, VP) - work_size(1, H, N, K, F, VP)) * itemsize
    return max(1, min(PIECE, WORK_BYTES // per_token))
