"""Train a byte-level language model: softmax attention, `linear_attn` (elu, normalised) or `gla`, the same budget each.

    python train.py data runs/gla --kind gla

Stop it at any time: the same command goes on from the last save. After the last step it writes a checkpoint in
flash-linear-attention's format to the folder (config.json, model.safetensors), and curve.json: training loss and bits
per byte of held-out text as it went. Softmax is a baseline and has no such format; its folder has the figures alone.

Needs torch (the extra `train`) and the text that prepare.py makes.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

KINDS = ("softmax", "linear_attn", "gla")
CHUNK = 32  # tokens that gla takes at once in training
LOWEST = -1.0  # log decay of a token: exp(CHUNK) stays in range; the checkpoint says so too (clamp_min)
SAVE_EVERY = 60.0  # seconds


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Mixer(nn.Module):
    """Heads, projections and what all three have in common; module names are those of the checkpoint format."""

    def __init__(self, width: int, heads: int, key: int) -> None:
        super().__init__()
        self.heads, self.key, self.value = heads, key // heads, width // heads
        self.q_proj = nn.Linear(width, key, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def split(self, x):
        """[B, T, heads * width] → [B, heads, T, width]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def qkv(self, x):
        return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))


class Softmax(Mixer):
    """Causal softmax attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, width)

    def turn(self, x):
        T, half = x.shape[-2], x.shape[-1] // 2
        angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        a, b = x.split(half, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)

    def forward(self, x):
        q, k, v = self.qkv(x)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LinearAttention(Mixer):
    """elu(x) + 1, normalised: Katharopoulos et al. 2020, in the quadratic form, which is faster at this length."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, width)
        self.norm = RMSNorm(self.value)

    def forward(self, x):
        q, k, v = self.qkv(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        weights = (q @ k.transpose(-1, -2)).tril()
        y = weights @ v / (weights.sum(-1, keepdim=True) + 1e-10)
        return self.o_proj(self.norm(y).transpose(1, 2).flatten(2))


class GatedLinearAttention(Mixer):
    """Yang et al. 2023, chunk by chunk: within a chunk the quadratic form, a state between chunks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, width // 2)
        self.gk_proj = nn.Sequential(nn.Linear(width, 16, bias=False), nn.Linear(16, width // 2))
        self.g_proj = nn.Linear(width, width, bias=False)
        self.g_norm = RMSNorm(self.value)

    def forward(self, x):
        q, k, v = self.qkv(x)
        g = (F.logsigmoid(self.split(self.gk_proj(x))) / 16).clamp_min(LOWEST)
        S = q.new_zeros(*q.shape[:2], self.key, self.value)
        parts = []
        for start in range(0, x.shape[1], CHUNK):
            qc, kc, vc, gc = (a[:, :, start : start + CHUNK] for a in (q, k, v, g))
            total = gc.cumsum(2)
            grown = qc * total.exp()
            within = (grown @ (kc * (-total).exp()).transpose(-1, -2)).tril()
            parts.append(grown @ S + within @ vc)
            last = total[:, :, -1:]
            S = last.exp().transpose(-1, -2) * S + (kc * (last - total).exp()).transpose(-1, -2) @ vc
        y = self.g_norm(torch.cat(parts, 2) * self.key**-0.5).transpose(1, 2).flatten(2)
        return self.o_proj(y * F.silu(self.g_proj(x)))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, kind: str, width: int, heads: int, inner: int) -> None:
        super().__init__()
        mixer = {"softmax": Softmax, "linear_attn": LinearAttention, "gla": GatedLinearAttention}[kind]
        self.attn_norm, self.attn = RMSNorm(width), mixer(width, heads)
        self.mlp_norm, self.mlp = RMSNorm(width), Mlp(width, inner)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    def __init__(self, kind: str, width: int, depth: int, heads: int, inner: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(256, width)
        self.model.layers = nn.ModuleList(Block(kind, width, heads, inner) for _ in range(depth))
        self.model.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if last else 0.02)

    def forward(self, ids):
        x = self.model.embeddings(ids)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x))


def bits_per_byte(model: LanguageModel, text: torch.Tensor, window: int, most: int | None = None) -> float:
    """Over windows that each begin without history; the first byte of a window is not scored."""
    model.eval()
    windows = text[: len(text) // window * window].view(-1, window)[:most]
    total = 0.0
    with torch.no_grad():
        for batch in windows.split(8):
            logits = model(batch[:, :-1])
            total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return total / (windows.numel() - len(windows)) / math.log(2)


def config(args: argparse.Namespace) -> dict:
    """config.json, as flash-linear-attention reads it."""
    common = {
        "model_type": args.kind,
        "hidden_size": args.width,
        "num_hidden_layers": args.depth,
        "num_heads": args.heads,
        "intermediate_size": args.inner,
        "vocab_size": 256,
        "hidden_act": "swish",
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "fuse_norm": False,
        "expand_v": 1.0,
    }
    own = {
        "linear_attn": {"expand_k": 1.0, "feature_map": "elu", "norm_feature_map": True},
        "gla": {"expand_k": 0.5, "gate_logit_normalizer": 16, "clamp_min": LOWEST},
    }
    return common | own.get(args.kind, {})


def write_json(path: Path, value: object) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, default=2700, help="about half an hour on two cores")
    for name, value in (("width", 128), ("depth", 6), ("heads", 4), ("inner", 352), ("length", 256), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    train, held = (
        torch.from_numpy(np.fromfile(args.data / f"{name}.txt", np.uint8).astype(np.int64))
        for name in ("train", "held_out")
    )
    model = LanguageModel(args.kind, args.width, args.depth, args.heads, args.inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)
    random = np.random.default_rng(args.seed)
    saved = args.out / "training.pt"
    step, seconds, curve = 0, 0.0, []
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        if state["settings"] != {k: str(v) for k, v in vars(args).items()}:
            raise SystemExit(f"{saved}: made with other settings: {state['settings']}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        random.bit_generator.state = state["random"]
        step, seconds, curve = state["step"], state["seconds"], state["curve"]

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": random.bit_generator.state,
            "step": step,
            "seconds": seconds,
            "curve": curve,
            "settings": {k: str(v) for k, v in vars(args).items()},
        }
        temporary = saved.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, saved)

    losses, last_save = [], time.monotonic()
    while step < args.steps:
        begin = time.monotonic()
        done = step / args.steps
        rate = args.rate * min(1.0, (step + 1) / 200) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = random.integers(0, len(train) - args.length - 1, args.batch)
        batch = torch.stack([train[i : i + args.length + 1] for i in at])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):
            raise SystemExit(f"step {step}: the loss is {loss.item()}")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses.append(loss.item() / math.log(2))
        seconds += time.monotonic() - begin
        if time.monotonic() - last_save > SAVE_EVERY or step == args.steps:
            point = {
                "minutes": round(seconds / 60, 2),
                "step": step,
                "train": round(float(np.mean(losses)), 4),
                "held_out": round(bits_per_byte(model, held, args.length, 256), 4),
            }
            curve.append(point)
            print(point, flush=True)
            losses, last_save = [], time.monotonic()
            save()

    figures = {
        "kind": args.kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": round(seconds / 60, 1),
        "steps": step,
        "bytes_seen": step * args.batch * args.length,
        "held_out_bits_per_byte": round(bits_per_byte(model, held, args.length), 4),
        "held_out_bits_per_byte_at_4x_length": round(bits_per_byte(model, held, 4 * args.length), 4),
        "curve": curve,
    }
    write_json(args.out / "curve.json", figures)
    print({name: value for name, value in figures.items() if name != "curve"})
    if args.kind != "softmax":
        save_file(
            {name: p.detach().contiguous() for name, p in model.state_dict().items()}, args.out / "model.safetensors"
        )
        write_json(args.out / "config.json", config(args))


if __name__ == "__main__":
    main()
