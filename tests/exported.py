"""Exported files for the tests: written once for each case, driven in ONNX Runtime, compared with the oracle."""

import numpy as np
import pytest

import linattn_export as lx
import naive

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

FLAVORS = ["fused", "standard", "portable"]


def session(path):
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def decay_kind(case):
    return "channel" if case.g is not None and case.g.ndim == 4 else "head"


class Exported:
    """The file of a case's layer, and a session of it."""

    def __init__(self, case, folder, flavor, **options):
        self.case, self.path = case, folder / "layer.onnx"
        self.contract = lx.export_layer(case.attn, self.path, flavor, decay=decay_kind(case), **options)
        self.session = session(self.path)
        self.outputs = [output.name for output in self.session.get_outputs()]

    def tokens(self, part=slice(None)):
        """The packed inputs of some positions."""
        case, B = self.case, len(self.case.q)
        given = {"query": case.q, "key": case.k, "value": case.v, "decay": case.g, "beta": case.beta}
        dtypes = {tensor.name: tensor.dtype for tensor in self.contract.inputs}
        found = {}
        for name, a in given.items():
            if name in dtypes:
                a = a[:, part]
                found[name] = a.reshape(B, a.shape[1], int(np.prod(a.shape[2:]))).astype(dtypes[name])
        return found

    def start(self):
        """The past-state inputs before the first token."""
        return lx.state_feeds(self.case.start(), self.path)

    def run(self, feeds):
        return dict(zip(self.outputs, self.session.run(None, feeds), strict=True))

    def chain(self, lengths):
        """The output [B, T, heads, V] of pieces of those lengths, and the last present state."""
        case, B = self.case, len(self.case.q)
        assert sum(lengths) == case.q.shape[1]
        state, pieces, start = self.start(), [], 0
        for length in lengths:
            found = self.run(self.tokens(slice(start, start + length)) | state)
            pieces.append(found["output"])
            state = {entry.past: found[entry.present] for entry in self.contract.states}
            start += length
        return np.concatenate(pieces, axis=1).reshape(B, start, -1, case.v.shape[-1]), state

    def check(self, lengths, bound=2e-5, state_bound=2e-5, what=""):
        """Run pieces of those lengths and compare output and state with the oracle."""
        case = self.case
        want, S, z = case.expected
        y, state = self.chain(lengths)
        naive.assert_close(y, want, bound, f"{what} output")
        if S is not None:
            S = S if z is None else np.concatenate([S, z[..., None]], axis=-1)
            naive.assert_close(state["past_state"], S, state_bound, f"{what} state")
        if "past_position" in state:
            np.testing.assert_array_equal(state["past_position"], case.position + np.full(len(y), case.q.shape[1]))
