"""A model as a list of operations: what `models/` writes and `decoder.py` runs, without returning to Python.

An operation is a row of WIDTH int64: its code, then operands. Buffers are named by how many numbers a token has in all
buffers before them, so a buffer of width w holds [rows, w] for any number of rows; weights are addresses.
"""

CODE, A, B, OUT, N, M, WEIGHT, SCALE, KIND, EXTRA, REAL, STATE = range(12)  # operands of an operation
WIDTH = 12

# codes. Each reads A (and B) and writes OUT; N and M are widths
EMBED = 0  # OUT [M] = row of WEIGHT [N, M] for each token
NORM = 1  # OUT = A / rms(A), times WEIGHT [M] unless 0; N groups of M numbers; REAL: eps
MATMUL = 2  # OUT [N] = WEIGHT [N, M] · A [M], plus the bias at EXTRA unless 0
ADD_MATMUL = 3  # the same, added to OUT
ACT_MULTIPLY = 4  # A = act(A), OUT = A * B, N numbers; EXTRA: which act
ACT = 5  # A = act(A)
LOG_DECAY = 6  # OUT = max(log σ(A) / WEIGHT[0], WEIGHT[1])
CONV = 7  # OUT [N] = silu of a convolution over M tokens, WEIGHT [N, M], bias EXTRA; place KIND of layer STATE
ATTENTION = 8  # OUT = layer STATE, plan WEIGHT, on A = q, B = k, v at EXTRA, and N decays a head (0 or F) at KIND
PHI = 9  # OUT = features of A, N heads of M numbers; WEIGHT: code, numbers, rows, P, F
SUM_NORM = 10  # OUT = A / (sum(A) + REAL), N groups of M numbers

# activations
SILU, SIGMOID, RELU, RELU2, GELU, LOG_SIGMOID = range(6)

# How a matrix [N, M] is stored: KIND of EMBED and MATMUL says as what, and LANES rows lie side by side, [N / LANES, M,
# LANES], so that as many outputs grow in one register and no sum goes across one. Rows are filled up with zeros, and so
# are scales and biases.
FLOAT32, FLOAT16, INT8 = range(3)
LANES = 16


def filled(n: int) -> int:
    """Rows that n rows take."""
    return -(-n // LANES) * LANES


PLACES = 4  # addresses for each layer: its state, and the past tokens of up to three convolutions
