"""Prefills over a Dask cluster of real processes, one of which is killed."""

import os
import signal
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import make
from linattn_edge.cluster import cluster_prefill
from linattn_edge.errors import NotFiniteError, StateMismatchError

distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dask's own


@pytest.fixture(scope="module")
def client():
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options, silence_logs=50) as cluster, distributed.Client(cluster) as client:
        yield client


class Slow:
    """A piece that a worker makes itself, and takes its time."""

    def __init__(self, tokens, seconds):
        self.tokens, self.seconds = tokens, seconds

    def __call__(self):
        time.sleep(self.seconds)
        return self.tokens


def pieces_of(case, edges, seconds=None):
    found = []
    for a, b in pairwise(edges):
        (q, k, v), rest = case.tokens(slice(a, b))
        piece = {"q": q, "k": k, "v": v} | rest
        found.append(piece if seconds is None else Slow(piece, seconds))
    return found


@pytest.mark.parametrize(
    ("rule", "gate", "phi"), [("linear", None, "elu"), ("gated", "channel", "elu"), ("linear", None, "cosformer")]
)
def test_workers_answer_as_one(client, rule, gate, phi):
    case = make(rule, gate, "mha", phi, B=2, T=60, normalize=phi == "elu", start=True)
    state = case.start()
    answers = cluster_prefill(client, case.attn, pieces_of(case, [0, 7, 7, 30, 31, 60]), state)
    want, S, z = case.expected
    naive.assert_close(np.concatenate(client.gather(answers), axis=1), want, 2e-6)
    naive.assert_close(state.S, S, 2e-6)
    if z is not None:
        naive.assert_close(state.z, z, 2e-6)
    assert state.position.tolist() == [60, 60]


def test_a_worker_that_is_killed(client):
    case = make("gated", "head", B=1, T=80, normalize=True)
    victim = next(iter(client.run(os.getpid).values()))
    state, killed = case.start(), []

    def kill():
        time.sleep(1.0)
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)

    thread = threading.Thread(target=kill)
    thread.start()
    answers = cluster_prefill(client, case.attn, pieces_of(case, list(range(0, 81, 8)), 0.3), state)
    y = np.concatenate(client.gather(answers), axis=1)
    thread.join()
    assert killed
    want, S, _ = case.expected
    naive.assert_close(y, want, 2e-6)
    naive.assert_close(state.S, S, 2e-6)


def test_errors_come_back_and_change_nothing(client):
    case = make("linear", B=1, T=20)
    pieces = pieces_of(case, [0, 10, 20])
    pieces[1]["v"] = np.full_like(pieces[1]["v"], np.nan)
    state = case.start()
    with pytest.raises(NotFiniteError):
        cluster_prefill(client, case.attn, pieces, state)
    assert state.position.tolist() == [0]
    for name, wrong, message in (
        ("q", np.full_like(pieces[0]["q"], np.nan), "piece 1: q: nan"),
        ("q", pieces[0]["q"][:, :, :, :2], "piece 1: q: expected shape"),
        ("q", pieces[0]["q"][:, :3], "piece 1: k: expected shape"),
        ("q", "words", "piece 1: q"),
        ("lengths", [3], "piece 1: expected q, k, v .and g., got q, k, v, lengths"),
    ):
        bad = [pieces[0], pieces[0] | {name: wrong}]
        with pytest.raises((ValueError, TypeError), match=message):
            cluster_prefill(client, case.attn, bad, state)
    with pytest.raises(TypeError, match="takes exactly one argument") as caught:
        cluster_prefill(client, case.attn, [pieces[0], len], state)
    assert "piece 1: its function raised this" in caught.value.__notes__
    for bad, message in (
        ([{"q": 1, "k": 2}], "piece 0: expected q, k, v .and g., got q, k$"),
        ([lambda: None], "piece 0: expected a mapping with q, k, v .and g., got NoneType"),
        (None, "pieces: expected a list of mappings or functions, got NoneType"),
        (pieces[0], "pieces: expected a list of mappings or functions, got dict"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            cluster_prefill(client, case.attn, bad, state)
    with pytest.raises(TypeError, match=r"client: expected a dask\.distributed\.Client, got NoneType"):
        cluster_prefill(None, case.attn, [], state)
    assert state.position.tolist() == [0]
    first, _ = client.gather(cluster_prefill(client, case.attn, (pieces[0] for _ in range(2)), state))
    assert first.shape[1] == 10 and state.position.tolist() == [20]
    delta = la.LinearAttention(1, 4, feature_map="identity", update_rule="delta")
    with pytest.raises(StateMismatchError, match="merge"):
        cluster_prefill(client, delta, [], delta.init_state())


class Drawn:
    """Tokens `first` to `last` of a stream of a million, made where they are needed."""

    WIDTH = 16

    def __init__(self, first, last):
        self.first, self.last = first, last

    def __call__(self):
        rng = np.random.default_rng(self.first)
        count = self.last - self.first
        q, k, v = (rng.standard_normal((1, count, 1, self.WIDTH), dtype=np.float32) for _ in range(3))
        return {"q": q, "k": k, "v": v, "g": -rng.random((1, count, 1), dtype=np.float32) / 100}


@pytest.mark.slow
def test_a_million_tokens_and_a_worker_that_is_killed(client):
    attn = la.LinearAttention(1, Drawn.WIDTH, update_rule="gated", normalize=True)
    pieces = [Drawn(first, first + 50_000) for first in range(0, 1_000_000, 50_000)]
    alone, state = attn.init_state(), attn.init_state()
    want = [attn.prefill(**piece(), state=alone) for piece in pieces]
    victim = next(iter(client.run(os.getpid).values()))
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    answers = cluster_prefill(client, attn, pieces, state)
    for answer, y in zip(answers, want, strict=True):
        naive.assert_close(answer.result(), y, 2e-6)
    naive.assert_close(state.S, alone.S, 2e-6)
    assert state.position.tolist() == [1_000_000]
    assert victim not in client.run(os.getpid).values()
