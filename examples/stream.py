"""A stream of tokens, one at a time: what does the next one cost at position 100, and at position 100,000?

Linear attention folds the past into a state of fixed size. Softmax attention keeps every key and value and scans them.
"""

import tempfile
from pathlib import Path
from time import perf_counter_ns

import numpy as np

import linattn_edge as la

HEADS, WIDTH = 4, 32
POSITIONS = (100, 1_000, 10_000, 100_000)
SAMPLES = 50  # tokens timed before each position

linear = la.LinearAttention(num_heads=HEADS, key_dim=WIDTH, feature_map="elu")
softmax = la.SoftmaxAttention(num_heads=HEADS, key_dim=WIDTH)

# The tokens' queries, keys and values: [T, B, heads, width], used over and over.
q, k, v = np.random.default_rng(0).standard_normal((3, 1_000, 1, HEADS, WIDTH), dtype=np.float32)
out = np.empty_like(v[0])  # with `out`, a step allocates nothing
for attn in (linear, softmax):
    attn.step(q[0], k[0], v[0], attn.init_state(), out=out)  # compiles, or loads what an earlier run compiled


def microseconds(attn, state):
    """Step through SAMPLES tokens; the median time of one."""
    times = []
    for t in range(SAMPLES):
        start = perf_counter_ns()
        attn.step(q[t], k[t], v[t], state, out=out)
        times.append(perf_counter_ns() - start)
    return np.median(times) / 1_000


state = linear.init_state()
cache = softmax.init_state()

print(f"{'position':>8} {'linear µs':>11} {'state bytes':>12} {'softmax µs':>11} {'cache bytes':>12}")
done = 0
for position in POSITIONS:
    for t in range(position - SAMPLES - done):  # one by one, as they come in
        i = t % len(q)
        linear.step(q[i], k[i], v[i], state, out=out)
        softmax.write(k[i], v[i], cache)  # it need not answer in between
    a, b = microseconds(linear, state), microseconds(softmax, cache)
    print(f"{position:>8,} {a:>11.1f} {state.nbytes:>12,} {b:>11.1f} {cache.nbytes:>12,}")
    done = position

# A state is small enough to save at any token; another process can go on from there.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "stream.safetensors"
    state.save(path)
    resumed = la.State.load(path, linear)
    size = path.stat().st_size

same = np.array_equal(linear.step(q[0], k[0], v[0], state), linear.step(q[0], k[0], v[0], resumed))
print(f"saved {size:,} bytes at position {POSITIONS[-1]:,}; resumed stream gives the same output: {same}")
