"""What `advance` tells `columns` (see there) about one group of state heads and one piece of tokens: int64 fields.

Rows of k, decay, Λk (DK) and Λq (DQ) are LD numbers apart, rows of q LDQ; heads within a row F. Without decay all heads
read one row of ones (LDD and DH are 0). v is at t * VT + head * VH, y for query head j of a state head at
t * YT + head * YH + j * YJ; beta and q·k at t * GROUP + head.
"""

RULE, MODE, VP, F, R, SHARED_KEYS, SHARED = range(7)  # states that share one key head, one query head
GROUP, FIRST_HEAD, COUNT = range(7, 10)  # state heads, the first one, tokens
S, BUFFER, K, Q, DECAY, DK, DQ, V, Y, BETA, QK = range(10, 21)  # addresses
LD, LDQ, LDD, DH, VT, VH, YT, YH, YJ = range(21, 30)
NORMALIZE, FACTORS = 30, 31  # 1 to multiply y by its factor, at (t * GROUP + head) * R + j
FAR, NOW = 32, 33  # of a compensated state the address of its totals, else 0; the position of the first token
SIZE = 34
