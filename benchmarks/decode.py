"""One token of the bundled model: linattn_edge against the same model in torch, eager and compiled, in one process.

    python benchmarks/decode.py [--model FOLDER] [--json FILE]

Needs torch (the extra `train`); torch.compile also a C++ compiler. Also measured: positions 100 and 100,000 in turn,
memory over 100,000 tokens, and a softmax model of the same size in torch where --softmax says how long its cache is.
All run in turn, on one thread and on all cores for torch, whichever is faster; least times.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import linattn_edge as la
from linattn_edge.bench.machine import machine, resident_memory
from linattn_edge.bench.turns import alternate, timed
from linattn_edge.models import bundled

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    raise SystemExit("decode.py needs torch: pip install 'linattn-edge[train]'") from None


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class TorchGla:
    """The decode step of a `gla` checkpoint, as one would write it in torch: one token, the states updated in place."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {n: torch.from_numpy(a.astype(np.float32)) for n, a in load_file(folder / "model.safetensors").items()}
        self.heads, self.depth = self.config["num_heads"], self.config["num_hidden_layers"]
        self.normalizer, self.lowest = self.config["gate_logit_normalizer"], self.config["clamp_min"]
        for i in range(self.depth):  # one product instead of four, and one instead of two
            at = f"model.layers.{i}."
            names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.g_proj", "attn.gk_proj.0")
            self.w[at + "in"] = torch.cat([self.w[f"{at}{n}.weight"] for n in names])
            self.w[at + "up"] = torch.cat([self.w[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up")])

    def init_state(self) -> list[torch.Tensor]:
        key = self.w["model.layers.0.attn.k_proj.weight"].shape[0] // self.heads
        value = self.w["model.layers.0.attn.v_proj.weight"].shape[0] // self.heads
        return [torch.zeros(self.heads, key, value) for _ in range(self.depth)]

    def step(self, token: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
        w, H = self.w, self.heads
        h = F.embedding(token, w["model.embeddings.weight"])[0]
        for i, S in enumerate(states):
            at = f"model.layers.{i}."
            x = rms_norm(h, w[at + "attn_norm.weight"])
            K, V = S.shape[1:]
            q, k, v, gate, low = (x @ w[at + "in"].T).split([H * K, H * K, H * V, H * V, 16])
            g = F.linear(low, w[at + "attn.gk_proj.1.weight"], w[at + "attn.gk_proj.1.bias"])
            g = (F.logsigmoid(g) / self.normalizer).clamp_min(self.lowest).exp()
            S.mul_(g.view(H, K, 1)).add_(k.view(H, K, 1) * v.view(H, 1, V))
            y = (q.view(H, 1, K) @ S).squeeze(1) * K**-0.5
            y = rms_norm(y, w[at + "attn.g_norm.weight"]).flatten() * F.silu(gate)
            h = h + w[at + "attn.o_proj.weight"] @ y
            x = rms_norm(h, w[at + "mlp_norm.weight"])
            a, b = (w[at + "up"] @ x).chunk(2)
            h = h + w[at + "mlp.down_proj.weight"] @ (F.silu(a) * b)
        return w["lm_head.weight"] @ rms_norm(h, w["model.norm.weight"])


def least(calls: dict) -> dict[str, float]:
    """Least µs of each call."""
    return {name: found["min"] for name, found in alternate({n: timed(c) for n, c in calls.items()}, 100).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=bundled(), help="a gla checkpoint")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ids = np.random.default_rng(0).integers(0, 256, 100)
    torch.set_grad_enabled(False)

    models = {w: la.load_model(args.model, weights=w) for w in ("float32", "float16", "int8")}
    peer = TorchGla(args.model)
    compiled = torch.compile(peer.step, dynamic=False)
    states = peer.init_state()
    state = models["float32"].init_state()
    worst = 0.0
    for token in ids:  # the peers must agree before they are timed
        expected = models["float32"].step([token], state)[0]
        worst = max(worst, float(np.abs(peer.step(torch.tensor([token]), states).numpy() - expected).max()))
    other = peer.init_state()
    for token in ids:
        last = compiled(torch.tensor([token]), other)
    worst = max(worst, float(np.abs(last.numpy() - expected).max()))
    if worst > 1e-3:
        raise SystemExit(f"torch differs by {worst}")

    token, results = torch.tensor([32]), {}
    own = {w: m.init_state() for w, m in models.items()}
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        calls = {f"linattn_edge, {w}": (lambda w=w: models[w].step([32], own[w])) for w in models}
        calls["torch eager"] = lambda: peer.step(token, states)
        calls["torch.compile"] = lambda: compiled(token, other)
        for name, us in least(calls).items():
            results[name] = min(us, results.get(name, math.inf))

    model = models["float32"]
    early = model.init_state()
    model.prefill(ids[None], early)
    late = early.copy()
    for _ in range(200):
        model.step([32], late)
    before = resident_memory() or 0
    for _ in range(100_000 - int(late.position[0])):
        model.step([32], late)
    grown = ((resident_memory() or 0) - before) / 2**20
    flat = least({"early": lambda: model.step([32], early), "late": lambda: model.step([32], late)})

    figures = {
        "machine": machine(),
        "largest_difference": worst,
        "us_per_token": results,
        "eager_over_ours": results["torch eager"] / results["linattn_edge, float32"],
        "compile_over_ours": results["torch.compile"] / results["linattn_edge, float32"],
        "late_over_early": flat["late"] / flat["early"],
        "mebibytes_grown_in_100000_tokens": grown,
    }
    for name, us in results.items():
        print(f"{name:24s} {us:8.1f} µs a token")
    print(f"time at position 100,000 over that at 100: {figures['late_over_early']:.3f}")
    print(f"memory grown over 100,000 tokens: {grown:.2f} MiB")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
