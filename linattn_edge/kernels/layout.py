"""The memory block of one state: an int64 header, positions, S, z and scratch, in that order, 64-byte aligned.

One block is one argument to a compiled step, one copy to fork a stream. No Numba here: `state.py` lays blocks out,
the kernels read them. S is [B, N, F, VP] with the value width padded to VP, a multiple of `NARROW` columns.
"""

from typing import NamedTuple

from linattn_edge.kernels import sweep

# int64 header fields of a state
B, H, HK, N, K, V, F, VP = range(8)  # sizes: streams, query heads, key heads, state heads, widths, padded V
RULE, PLAIN = 8, 9  # which loop; 1 where φ is the identity
NORMALIZE, QK_NORM, EPS_ADD, CONSTANT_DECAY = 10, 11, 12, 13  # 0 or 1
TAKES_DECAY, TAKES_BETA = 14, 15
AT_POSITION, AT_S, AT_Z, AT_WORK, END = 17, 18, 19, 20, 21  # byte offsets
SCALE, EPS = 22, 23  # float64, stored as their bits
STEP_GROUP, STEP_WORK = 24, 25  # how a step is packed: state heads at once, bytes of scratch
PREFILL_GROUP, PREFILL_PIECE, PREFILL_WORK = 26, 27, 28  # and a prefill: tokens at once, too
AT_FAR_S, AT_FAR_Z = 30, 31  # of a compensated state: what S and z add to, byte offsets; 0 for none
WINDOW = 29  # tokens that a checkpoint of a stream in a pool keeps; 0 for none

# the job: what one call is about, written to the same header by a compiled entry, read by `advance`; addresses first
Q, KEYS, VALUES, G, BETA, LENGTHS, OUT, PLAN = range(32, 40)  # LENGTHS is 0 where every token is real
MODE, T, WIDTH, PIECE, GROUP, WORK = range(40, 46)  # WIDTH: decays for each head, 0, 1 or F
STREAMS = 46  # address of B addresses: streams of a pool, each in a record of its own; 0 where the block has them all
HEADER = 48

# A record is one stream of a pool (records.py): int64 fields, positions of further layers, S, z, convolutions. A job on
# records has a header of its own, in which AT_POSITION, AT_S and AT_Z count from the start of a record.
POSITION, GENERATION, USE, FRESH, JOURNAL, LOGGED = range(6)  # FRESH: to be zeroed; JOURNAL: an address, or 0
RECORD = 8  # fields; what a copy takes along is POSITION and all behind the fields
SLOT_BITS = 24  # an id is generation << SLOT_BITS | slot; a generation is odd while the stream is open

# USE: what a thread does with a record
FREE, LOOKING, COPYING, STEPPING = range(4)

# int64 fields of a plan: what a layer adds to every call
ADVANCE, PACK, COLUMNS_WIDE, COLUMNS_NARROW = range(4)  # addresses of compiled code, 0 where it is not needed
WEIGHTS, SIDES, HEADS, P = range(4, 8)  # φ's numbers [sides, heads, P], by address
CHECK = 8  # 1 to refuse NaN and inf, and norms beyond LIMIT
LIMIT = 9  # the norm of a query or key up to which φ stays in range, float64 stored as its bits; 0 for none
HORIZON = 10  # positions from here on are refused; 0 for none
COLUMNS = 11  # how many COLUMNS_WIDE takes at once
FOLD_Z = 12  # the address of what ends a compensated sum of keys
PLAN_SIZE = 13

NARROW = 8  # columns of S come in multiples of this
WIDE, WIDEST = 32, 64  # columns handled at once where V allows, and where the machine has the registers
PIECE_TOKENS = 64  # tokens packed together in a prefill, at most
GROUP_WIDTH = 256  # features that the heads packed together in a prefill have, at least: rows are read a KiB at a time
WORK_BYTES = 1 << 18  # scratch stays near this, in cache
AHEAD = 4  # tokens from which on rows are asked for before they are packed
PAD = 16  # numbers between packed rows, so that their addresses differ in more than a power of two
WORTH_SHARING = 1 << 20  # bytes of state, times tokens, from which a call may ask for helpers: waking one costs some µs

LONG = "float32 in two parts"  # the kind of a compensated state, of others their dtype

HALVES = ("float16", "bfloat16")  # state dtypes that are computed in float32

FOLD = 32  # tokens after which a compensated state adds what it has gathered to its total

# what a call does
WRITE, READ, STEP = 1, 2, 3

# what a compiled entry returns; anything but OK means that nothing was changed
OK, REFUSED = 0, 1

# and of streams: no such one; in use for a moment; in use; no checkpoint so far back. With the place of the id: code +
# CODES * place
STALE, WAIT, TAKEN, LAPSED = 2, 3, 4, 5
CODES = 8


def padded(V: int) -> int:
    """V rounded up to whole lanes."""
    return -(-V // NARROW) * NARROW


class Packing(NamedTuple):
    """How many heads and tokens `advance` packs together, and the bytes of scratch that takes."""

    group: int
    piece: int
    work: int


def packing(prefill: bool, H: int, N: int, K: int, F: int, VP: int, itemsize: int) -> Packing:
    """As much at once as stays in cache: in a step all heads, in a prefill enough heads for long rows."""
    r = max(1, H // N)

    def row(group: int) -> int:
        return (group * (F * (4 + r) + VP * (1 + r) + 2 + r) + 7 * PAD) * itemsize

    group = max(1, min(N, max(1, GROUP_WIDTH // F) if prefill else WORK_BYTES // row(1)))
    piece = max(1, min(PIECE_TOKENS, WORK_BYTES // row(group))) if prefill else 1
    return Packing(group, piece, 8 * sweep.SIZE + piece * row(group) + (K + F * WIDEST) * itemsize)
