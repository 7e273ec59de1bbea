"""Long runs and many threads: memory stays, numbers stay, the GIL is free."""

import gc
import os
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import linattn_edge as la

STEPS = 100_000
LINUX = os.path.exists("/proc/self/statm")


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def one_step(rule):
    """A function that takes one step into the same output, and its state."""
    attn = la.LinearAttention(2, 8, update_rule=rule, feature_map="relu")
    rng = np.random.default_rng(0)
    q, k, v = rng.random((3, 1, 2, 8)).astype(np.float32) / 2  # β|k|² below 2, so that the delta rule is stable
    state, out = attn.init_state(1), np.empty((1, 2, 8), np.float32)
    gates = {}
    if rule == "gated_delta":
        gates = {"g": np.full((1, 2), -0.1, np.float32), "beta": np.full((1, 2), 0.5, np.float32)}
    step = attn.step
    return (lambda: step(q, k, v, state, out=out, **gates)), state, out


@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
def test_a_hundred_thousand_steps_leave_no_memory_behind(rule):
    step, state, out = one_step(rule)
    for _ in range(200):
        step()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(100):
            step()
        before, _ = tracemalloc.get_traced_memory()
        rss = resident() if LINUX else 0
        tracemalloc.reset_peak()
        for _ in range(STEPS):
            step()
        after, peak = tracemalloc.get_traced_memory()
        grown = (resident() if LINUX else 0) - rss
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before < 2000  # not one byte for 50 steps
    assert peak - before < 4000  # and within a step only Python's own small objects
    assert grown < 1 << 20
    assert state.position.tolist() == [STEPS + 300]
    assert np.isfinite(out).all()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_steps_without_out_and_of_other_dtypes_leave_no_memory_behind():
    """The path that converts may allocate, but gives all of it back."""
    attn = la.LinearAttention(2, 8)
    q, k, v = np.ones((3, 1, 2, 8), np.float16)
    state = attn.init_state(1)

    def grown(n):
        """Bytes and Python's blocks that n pairs of calls left behind."""
        gc.collect()
        rss, blocks = resident(), sys.getallocatedblocks()
        for _ in range(n):
            attn.step(q, k, v, state)
            attn.step(q, k, v, state, active=[True])
        gc.collect()
        return resident() - rss, sys.getallocatedblocks() - blocks

    grown(500)  # what a first call leaves (caches, coverage's tables) is no leak
    rounds = [grown(5000) for _ in range(3)]  # a leak is in each; what other threads of the process do is not
    assert min(rss for rss, _ in rounds) < 1 << 20
    assert min(blocks for _, blocks in rounds) < 100


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_prefills_copies_and_selects_give_their_memory_back():
    attn = la.LinearAttention(2, 64)
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 100, 2, 64)).astype(np.float32)
    state = attn.init_state(4)

    def work(n):
        for _ in range(n):
            attn.prefill(q, k, v, state)
            state.copy().select([3, 0])
        gc.collect()

    work(10)
    rss = resident()
    work(100)  # each makes a 260 kB state and a 200 kB output: 46 MB if they stayed
    assert resident() - rss < 8 << 20


def test_eight_threads_step_eight_states_as_one_thread_does():
    attn = la.LinearAttention(2, 16, 24, update_rule="gated_delta", feature_map="identity")
    softmax = la.SoftmaxAttention(2, 16, 24)
    T, streams = 300, 8
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, streams, T, 1, 2, 16)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((streams, T, 1, 2, 24)).astype(np.float32)
    g, beta = (
        -rng.random((streams, T, 1, 2)).astype(np.float32),
        rng.random((streams, T, 1, 2)).astype(np.float32),
    )
    ready = threading.Barrier(streams)

    def stream(i, together):
        state, cache = attn.init_state(1), softmax.init_state(1, capacity=1)
        y = np.empty((T, 2, 1, 2, 24), np.float32)
        if together:
            ready.wait()
        for t in range(T):
            attn.step(q[i, t], k[i, t], v[i, t], state, g[i, t], beta[i, t], out=y[t, 0])
            softmax.step(q[i, t], k[i, t], v[i, t], cache, out=y[t, 1])
        part = slice(0, 64)
        sequence = [np.swapaxes(a[i, part], 0, 1) for a in (q, k, v)]
        gates = [np.swapaxes(a[i, part], 0, 1) for a in (g, beta)]
        last = attn.prefill(*sequence, state, *gates)
        return y, last, state.S.copy(), state.position.copy()

    alone = [stream(i, False) for i in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        for _ in range(2):
            for expected, got in zip(alone, pool.map(stream, range(streams), [True] * streams), strict=True):
                for a, b in zip(expected, got, strict=True):
                    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_long_prefill_leaves_other_threads_running(kind):
    """With the GIL held the other thread would not count at all while the kernel runs."""
    attn, T = (la.LinearAttention(8, 64), 8000) if kind == "linear" else (la.SoftmaxAttention(8, 64), 1200)
    q = np.full((1, T, 8, 64), 0.1, np.float32)
    out = np.empty((1, T, 8, 64), np.float32)
    attn.prefill(q[:, :1], q[:, :1], q[:, :1], attn.init_state(1), out=out[:, :1])
    longest = []
    for _ in range(5):  # a busy machine may hold the other thread back: once without is enough
        times = []
        stop = threading.Event()

        def count(times=times, stop=stop):
            while not stop.is_set():
                times.append(time.perf_counter())
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        state = attn.init_state(1)
        thread.start()
        try:
            start = time.perf_counter()
            attn.prefill(q, q, q, state, out=out)
            end = time.perf_counter()
        finally:
            stop.set()
            thread.join()
        inside = np.array([start, *(t for t in times if start < t < end), end])
        longest.append(np.diff(inside).max() / (end - start))
        if longest[-1] < 0.5:
            break
    assert min(longest) < 0.5
