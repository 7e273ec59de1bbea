"""num_threads: the same numbers, from several callers at once, and in a forked child."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import linattn_edge as la

NOJIT = os.environ.get("NUMBA_DISABLE_JIT") == "1"
pytestmark = pytest.mark.skipif(NOJIT, reason="interpreted loops are serial")

H, D = 32, 96  # 1.2 MB of state: shared even for one token


def made(rule="gated_delta", **options):
    attn = [
        la.LinearAttention(H, D, feature_map="identity", update_rule=rule, qk_norm=True, num_threads=n, **options)
        for n in (1, 2, 3)
    ]
    return attn, [a.init_state(2) for a in attn]


def tokens(seed, T=None):
    rng = np.random.default_rng(seed)
    lead = (2,) if T is None else (2, T)
    q, k, v = rng.standard_normal((3, *lead, H, D), dtype=np.float32)
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": -rng.random((*lead, H), np.float32),
        "beta": rng.random((*lead, H), np.float32),
    }


def test_results_do_not_depend_on_the_thread_count():
    attn, states = made()
    for seed in range(20):
        first, *others = [a.step(**tokens(seed), state=s) for a, s in zip(attn, states, strict=True)]
        for other in others:
            np.testing.assert_array_equal(other, first)
    lengths = [37, 5]
    first, *others = [a.prefill(**tokens(99, 37), state=s, lengths=lengths) for a, s in zip(attn, states, strict=True)]
    for other in others:
        np.testing.assert_array_equal(other, first)
    for state in states[1:]:
        np.testing.assert_array_equal(state.S, states[0].S)
        np.testing.assert_array_equal(state.position, [57, 25])


def test_small_calls_start_no_threads():
    before = threading.active_count()
    attn = la.LinearAttention(2, 8, num_threads=7)
    state = attn.init_state()
    x = np.ones((1, 2, 8), np.float32)
    for _ in range(10):
        attn.step(x, x, x, state)
    assert threading.active_count() == before


def test_several_callers_at_once():
    """Whoever finds the helpers busy works alone; nobody gets another's numbers."""
    attn, _ = made()
    inputs = [[tokens(100 * caller + t) for t in range(15)] for caller in range(4)]

    def replay(layer, caller):
        state = layer.init_state(2)
        return [layer.step(**x, state=state) for x in inputs[caller]], state

    results = {}
    threads = [threading.Thread(target=lambda c=c: results.update({c: replay(attn[1 + c % 2], c)})) for c in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for caller in range(4):
        want, state = replay(attn[0], caller)
        np.testing.assert_array_equal(results[caller][0], want)
        np.testing.assert_array_equal(results[caller][1].S, state.S)


def test_idle_helpers_sleep():
    attn, states = made()
    attn[2].step(**tokens(0), state=states[2])
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.1


FORK = """
import os, numpy as np, linattn_edge as la
attn = la.LinearAttention(32, 128, feature_map="identity", update_rule="gated", num_threads=2)
x, g = np.full((1, 32, 128), 0.1, np.float32), np.full((1, 32), -0.1, np.float32)
state = attn.init_state()
for _ in range(5):
    want = attn.step(x, x, x, state, g=g)
child = os.fork()
for _ in range(5):
    want = attn.step(x, x, x, state, g=g)
if child == 0:
    os._exit(0 if np.isfinite(want).all() and state.position[0] == 10 else 3)
assert os.waitpid(child, 0)[1] == 0
print("both went on")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_goes_on():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "both went on\n", done.stderr


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_thread_counts_that_are_refused(bad):
    with pytest.raises(ValueError, match="num_threads"):
        la.LinearAttention(1, 4, num_threads=bad)


@pytest.mark.nojit
def test_more_threads_than_one_is_no_error_anywhere():
    """Interpreted kernels too, which work alone."""
    attn = la.LinearAttention(64, 64, 64, feature_map="identity", num_threads=2)
    x = np.ones((1, 64, 64), np.float32)
    y = attn.step(x, x, x, attn.init_state())
    np.testing.assert_allclose(y, 8)  # 64 products of ones, divided by sqrt(64)
