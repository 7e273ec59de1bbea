"""Small checkpoints with random weights in fla's format, and their forward pass in plain float64 NumPy."""

import json
import math

import numpy as np
from safetensors.numpy import save_file

BASE = {
    "linear_attn": {
        "model_type": "linear_attn",
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "vocab_size": 19,
        "intermediate_size": 20,
        "feature_map": "elu",
        "norm_feature_map": True,
    },
    "gla": {
        "model_type": "gla",
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "vocab_size": 19,
        "intermediate_size": 20,
        "fuse_norm": False,
    },
}


def widths(c):
    H, hidden = c["num_heads"], c["hidden_size"]
    N = c.get("num_kv_heads") or H
    K = int(hidden * c.get("expand_k", 1.0 if c["model_type"] == "linear_attn" else 0.5)) // H
    return H, N, K, int(hidden * c.get("expand_v", 1.0)) // H


def make_tensors(c, seed=0):
    rng = np.random.default_rng(seed)

    def matrix(n, m):
        return rng.standard_normal((n, m)) / math.sqrt(m)

    H, N, K, V = widths(c)
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    affine = c.get("elementwise_affine", True)
    t = {"model.embeddings.weight": rng.standard_normal((c["vocab_size"], hidden))}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        if affine:
            for name in ("attn_norm", "mlp_norm"):
                t[f"{at}{name}.weight"] = 1 + 0.3 * rng.standard_normal(hidden)
        for name, n in (("q", H * K), ("k", N * K), ("v", N * V)):
            t[f"{at}attn.{name}_proj.weight"] = matrix(n, hidden)
            if c.get("use_short_conv"):
                t[f"{at}attn.{name}_conv1d.weight"] = rng.standard_normal((n, 1, c.get("conv_size", 4))) * 0.5
        t[f"{at}attn.o_proj.weight"] = matrix(hidden, H * V)
        if c["model_type"] == "gla":
            t[f"{at}attn.gk_proj.0.weight"] = matrix(16, hidden)
            t[f"{at}attn.gk_proj.1.weight"] = matrix(N * K, 16) * 4
            t[f"{at}attn.gk_proj.1.bias"] = rng.standard_normal(N * K)
            gate = c.get("use_output_gate", True)
            if gate:
                t[f"{at}attn.g_proj.weight"] = matrix(H * V, hidden)
            name = "g_norm_swish_gate" if c.get("fuse_norm", True) and gate else "g_norm"
        else:
            name = "norm"
            for side in ("q", "k"):
                source = f"{at}attn.feature_map_{side}."
                if c["feature_map"] in ("hedgehog", "t2r"):
                    t[source + "layer.weight"] = matrix(K, K)
                if c["feature_map"] == "hedgehog":
                    t[source + "layer.bias"] = rng.standard_normal(K) * 0.3
                if c["feature_map"] == "elementwise_product":
                    for layer in ("layer1", "layer2"):
                        t[f"{source}{layer}.weight"] = matrix(K, K)
                        t[f"{source}{layer}.bias"] = rng.standard_normal(K)
                if c.get("tie_feature_map_qk"):
                    break
        if affine:
            t[f"{at}attn.{name}.weight"] = 1 + 0.3 * rng.standard_normal(V)
        for part, n, m in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            t[f"{at}mlp.{part}_proj.weight"] = matrix(n, m)
    if affine:
        t["model.norm.weight"] = 1 + 0.3 * rng.standard_normal(hidden)
    if not c.get("tie_word_embeddings"):
        t["lm_head.weight"] = matrix(c["vocab_size"], hidden)
    return {name: np.ascontiguousarray(a, np.float32) for name, a in t.items()}


def write(folder, c, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    save_file(tensors, folder / "model.safetensors")
    return folder


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACT = {
    "relu": lambda x: np.maximum(x, 0),
    "sqrelu": lambda x: np.maximum(x, 0) ** 2,
    "swish": lambda x: x * sigmoid(x),
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "logsigmoid": lambda x: np.log(sigmoid(x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    None: lambda x: x,
}


def phi(c, t, at, side, x):
    name = c["feature_map"]
    source = f"{at}attn.feature_map_{'q' if c.get('tie_feature_map_qk') else side}."
    if name == "elu":
        return np.where(x >= 0, x + 1, np.exp(np.minimum(x, 0)))
    if name in ("relu", "identity"):
        return np.maximum(x, 0) if name == "relu" else x
    if name == "dpfp":
        r = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)
        return np.concatenate([r * np.roll(r, j, axis=-1) for j in range(1, 5)], axis=-1)
    if name == "elementwise_product":
        a, b = (x @ t[f"{source}{layer}.weight"].T + t[f"{source}{layer}.bias"] for layer in ("layer1", "layer2"))
        return a * b
    u = x @ t[source + "layer.weight"].T
    if name == "t2r":
        return np.maximum(u, 0)
    u = u + t[source + "layer.bias"]
    e = np.exp(np.concatenate([2 * u, -2 * u], axis=-1))
    return e / e.sum(axis=-1, keepdims=True)


def forward(c, tensors, ids):
    """Logits [T, vocab] of one stream of ids [T], by the quadratic form."""
    t = {name: a.astype(np.float64) for name, a in tensors.items()}
    H, N, K, V = widths(c)
    eps, T = c.get("norm_eps", 1e-6), len(ids)

    def norm(x, name):
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
        return y * t[name] if name in t else y

    def conv(x, name):
        w = t[name + ".weight"][:, 0]
        padded = np.concatenate([np.zeros((w.shape[1] - 1, x.shape[1])), x])
        return ACT["silu"](sum(padded[i : i + T] * w[:, i] for i in range(w.shape[1])))

    h = t["model.embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        x = norm(h, f"{at}attn_norm.weight")
        q, k, v = (x @ t[f"{at}attn.{name}_proj.weight"].T for name in "qkv")
        if c.get("use_short_conv"):
            q, k, v = (conv(a, f"{at}attn.{name}_conv1d") for a, name in ((q, "q"), (k, "k"), (v, "v")))
        q, k, v = q.reshape(T, H, K), k.reshape(T, N, K), v.reshape(T, N, V)
        if c["model_type"] == "gla":
            low = x @ t[f"{at}attn.gk_proj.0.weight"].T
            g = low @ t[f"{at}attn.gk_proj.1.weight"].T + t[f"{at}attn.gk_proj.1.bias"]
            g = np.log(sigmoid(g)) / c.get("gate_logit_normalizer", 16)
            if c.get("clamp_min") is not None:
                g = np.maximum(g, c["clamp_min"])
            q, k = (ACT[c.get("feature_map")](a) for a in (q, k))
            total = np.cumsum(g.reshape(T, N, K), axis=0)
        else:
            q, k = phi(c, t, at, "q", q), phi(c, t, at, "k", k)
            q = q / (q.sum(-1, keepdims=True) + 1e-4) if c.get("norm_q") else q
            k = k / (k.sum(-1, keepdims=True) + 1e-4) if c.get("norm_k") else k
            total = np.zeros((T, N, k.shape[-1]))
        o = np.zeros((T, H, V))
        for head in range(H):
            n = head * N // H
            decay = np.exp(np.minimum(total[:, None, n] - total[None, :, n], 0))  # [T, T, F]
            w = np.tril(np.einsum("tf,sf,tsf->ts", q[:, head], k[:, n], decay)) * k.shape[-1] ** -0.5  # F, not K
            o[:, head] = w @ v[:, n]
            if c.get("norm_feature_map"):
                o[:, head] /= w.sum(axis=1, keepdims=True) + 1e-10
        if c["model_type"] == "gla":
            gated = c.get("use_output_gate", True)
            o = norm(o, f"{at}attn.{'g_norm_swish_gate' if c.get('fuse_norm', True) and gated else 'g_norm'}.weight")
            if gated:
                o = o * ACT["silu"](x @ t[f"{at}attn.g_proj.weight"].T).reshape(T, H, V)
        else:
            o = norm(o, f"{at}attn.norm.weight")
        h = h + o.reshape(T, H * V) @ t[f"{at}attn.o_proj.weight"].T
        x = norm(h, f"{at}mlp_norm.weight")
        inner = ACT["silu"](x @ t[f"{at}mlp.gate_proj.weight"].T) * (x @ t[f"{at}mlp.up_proj.weight"].T)
        h = h + inner @ t[f"{at}mlp.down_proj.weight"].T
    return norm(h, "model.norm.weight") @ t.get("lm_head.weight", t["model.embeddings.weight"]).T
