"""The model types: one entry each in `ARCHITECTURES`, which turns a config and tensors into the operations of a block.

A mixer reads the buffer `x` (hidden, after the first norm of the block) and adds its result to `h`. It says which layer
its state belongs to. To add a model type, write one such function and list it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from linattn_edge.errors import CheckpointError
from linattn_edge.features import T2R, Dpfp, ElementwiseProduct, FeatureMap, Hedgehog, feature_map
from linattn_edge.layer import Layer, make_layer
from linattn_edge.models.assembly import Assembly

# keys of a config that change nothing here: training, serving, and what Hugging Face adds to every config
IRRELEVANT = {
    *("architectures", "attn_mode", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype"),
    *("fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm", "fuse_swiglu", "id2label", "initializer_range"),
    *("is_encoder_decoder", "label2id", "max_position_embeddings", "model_type", "output_attentions", "_name_or_path"),
    *("output_hidden_states", "pad_token_id", "problem_type", "return_dict", "torch_dtype", "transformers_version"),
    *("use_cache", "use_l2warp"),
}


class Config:
    """A config whose keys are all accounted for: those that are asked for, and those that change nothing."""

    def __init__(self, config: Mapping[str, Any], path: Any) -> None:
        self._config, self._path = dict(config), path
        self._asked = set(IRRELEVANT)

    def take(self, name: str, default: Any, kinds: type | tuple[type, ...]) -> Any:
        """A setting of one of these types; absent, it is fla's default."""
        self._asked.add(name)
        value = self._config.get(name, default)
        types_ = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in types_):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types_)
            raise CheckpointError(f"{self._path}: {name}: expected {names}, got {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.take(name, default, int)
        if not 1 <= value <= 1 << 24:
            raise CheckpointError(f"{self._path}: {name}: expected a whole number of at least 1, got {value!r}")
        return int(value)

    def only(self, name: str, *values: Any) -> None:
        """Refuse every other value of a setting; the first one is its default."""
        self._asked.add(name)
        value = self._config.get(name, values[0])
        if value not in values:
            known = " or ".join(map(repr, values))
            raise CheckpointError(f"{self._path}: {name} = {value!r} is not supported; expected {known}")

    def number(self, name: str, default: float | None, least: float, most: float) -> float | None:
        """A number from `least` to `most`, or None where that is the default."""
        value = self.take(name, default, (int, float) if default is not None else (int, float, type(None)))
        if value is not None and not least <= value <= most:  # NaN too
            raise CheckpointError(f"{self._path}: {name}: expected a number from {least:g} to {most:g}, got {value!r}")
        return None if value is None else float(value)

    def part(self, whole: int, name: str, default: float) -> int:
        """int(whole · ratio), as fla computes widths."""
        ratio = self.number(name, default, 1e-6, 1024)
        assert ratio is not None
        return int(whole * ratio)

    def inner(self, hidden: int) -> int:
        """The width of the MLP, as fla computes it where it is not given: a multiple of 256."""
        ratio = self.number("hidden_ratio", None, 1e-6, 1024)
        if self.take("intermediate_size", None, (int, type(None))) is not None:
            return self.size("intermediate_size")
        return -(-int(hidden * (4 if ratio is None else ratio) * 2 / 3) // 256) * 256

    def fail(self, message: str) -> NoReturn:
        """Refuse the config."""
        raise CheckpointError(f"{self._path}: {message}")

    def check_all_taken(self) -> None:
        """Refuse a setting that nothing has asked for, unless it says nothing (null or false)."""
        said = {name for name, value in self._config.items() if value is not None and value is not False}
        unknown = said - self._asked
        if unknown:
            settings = ", ".join(f"{name} = {self._config[name]!r}" for name in sorted(unknown))
            raise CheckpointError(f"{self._path}: settings that are not supported: {settings}")


@dataclass(frozen=True)
class Heads:
    """Widths of a mixer."""

    H: int
    N: int
    K: int
    V: int


def _heads(config: Config, hidden: int, expand_k: float) -> Heads:
    H = config.size("num_heads", 4)
    N = H if config.take("num_kv_heads", None, (int, type(None))) is None else config.size("num_kv_heads")
    key, value = config.part(hidden, "expand_k", expand_k), config.part(hidden, "expand_v", 1.0)
    if N < 1 or H % N or key % H or value % H or not key or not value:
        raise CheckpointError(
            f"num_heads = {H}, num_kv_heads = {N}: do not divide key width {key}, value width {value}"
        )
    return Heads(H, N, key // H, value // H)


def linear_attn(config: Config, build: Assembly, index: int) -> Layer:
    """fla's `linear_attn`: φ by name, normalised or not, RMSNorm of each head's output."""
    at = f"model.layers.{index}.attn"
    hidden, eps = build.hidden, build.eps
    size = _heads(config, hidden, 1.0)
    phi = _linear_attn_map(config, build, at, size.K)
    normalize = config.take("norm_feature_map", False, bool)
    sums = [config.take(name, False, bool) for name in ("norm_q", "norm_k")]
    q = build.linear(f"{at}.q_proj", "x", hidden, size.H * size.K)
    k = build.linear(f"{at}.k_proj", "x", hidden, size.N * size.K)
    v = build.linear(f"{at}.v_proj", "x", hidden, size.N * size.V)
    options: dict[str, Any] = {"num_kv_heads": size.N if size.N < size.H else None, "update_rule": "linear"}
    F = phi.checked_dim(size.K)
    scale = {} if normalize else {"scale": F**-0.5}  # fla's default is that of the features' width, not the heads'
    options |= {"normalize": normalize, "eps": 1e-10 * np.sqrt(F), "eps_mode": "add"}
    if any(sums):
        q = build.features(phi, q, size.H, size.K, F, side=1, sum_norm=sums[0])
        k = build.features(phi, k, size.N, size.K, F, side=0, sum_norm=sums[1])
        layer = make_layer(size.H, F, size.V, feature_map_="identity", **options, **scale)
    else:
        layer = make_layer(size.H, size.K, size.V, feature_map_=phi, **options, **scale)
    y = build.attention(layer, q, k, v)
    build.norm(f"{at}.norm", y, y, size.V, eps, groups=size.H)
    build.linear(f"{at}.o_proj", y, size.H * size.V, hidden, add_to="h")
    return layer


def _linear_attn_map(config: Config, build: Assembly, at: str, K: int) -> FeatureMap:
    name = config.take("feature_map", "elementwise_product", str)
    tied = config.take("tie_feature_map_qk", False, bool)
    if name in ("elu", "relu", "identity"):
        return feature_map(name)
    if name == "dpfp":
        return Dpfp(nu=4)
    layers = {"hedgehog": ["layer"], "t2r": ["layer"], "elementwise_product": ["layer1", "layer2"]}.get(name)
    if layers is None:
        config.fail(f"feature_map = {name!r} is not supported")
    sides = []
    for side in ("q", "k"):
        source = f"{at}.feature_map_{side}"
        if tied and f"{source}.{layers[0]}.weight" not in build.tensors:
            continue  # stored once, under either name
        weights = [build.tensors.take(f"{source}.{layer}.weight", (K, K)) for layer in layers]
        biases = [None if name == "t2r" else build.tensors.take(f"{source}.{layer}.bias", (K,)) for layer in layers]
        sides.append((weights, biases))
    if not sides:
        raise CheckpointError(f"tensor {at}.feature_map_q.{layers[0]}.weight is missing")
    make: Callable[..., Any] = {"hedgehog": Hedgehog, "t2r": T2R, "elementwise_product": ElementwiseProduct}[name]
    options = {"variant": "joint"} if name == "hedgehog" else {}
    maps = [make(*weights, *biases, **options) for weights, biases in sides]
    if tied and maps[0] != maps[-1]:
        config.fail(f"tie_feature_map_qk is true, but {at} has different weights for q and k")
    return make(*sides[0][0], *sides[0][1], key=maps[-1], **options)


ACTIVATIONS = ("swish", "silu", "sigmoid", "logsigmoid", "gelu")  # of gla's feature_map, beside relu and sqrelu


def gla(config: Config, build: Assembly, index: int) -> Layer:
    """fla's `gla`: per-channel log decay from a low-rank gate, gated RMSNorm output, optional short convolutions."""
    at = f"model.layers.{index}.attn"
    hidden, eps, tensors = build.hidden, build.eps, build.tensors
    size = _heads(config, hidden, 0.5)
    config.only("use_gk", True)
    config.only("use_gv", False)
    q = build.linear(f"{at}.q_proj", "x", hidden, size.H * size.K)
    k = build.linear(f"{at}.k_proj", "x", hidden, size.N * size.K)
    v = build.linear(f"{at}.v_proj", "x", hidden, size.N * size.V)
    if config.take("use_short_conv", False, bool):
        kernel = config.size("conv_size", 4)
        for name, buffer, width in (("q", q, size.H * size.K), ("k", k, size.N * size.K), ("v", v, size.N * size.V)):
            build.conv(f"{at}.{name}_conv1d", buffer, width, kernel)
    else:
        config.take("conv_size", 4, int)
    rank = config.size("gate_low_rank_dim", 16)
    low = build.linear(f"{at}.gk_proj.0", "x", hidden, rank)
    g = build.linear(f"{at}.gk_proj.1", low, rank, size.N * size.K, bias=True)
    normalizer = config.number("gate_logit_normalizer", 16, 1e-6, 1e6)
    assert normalizer is not None
    clamp = config.number("clamp_min", None, -1e30, 0)
    build.log_decay(g, size.N * size.K, normalizer, -np.inf if clamp is None else clamp)
    name = config.take("feature_map", None, (str, type(None)))
    phi = {None: "identity", "relu": "relu", "sqrelu": "relu2"}.get(name)
    if phi is None:
        if name not in ACTIVATIONS:
            config.fail(f"feature_map = {name!r} is not supported")
        build.act(name, q, size.H * size.K)
        build.act(name, k, size.N * size.K)
        phi = "identity"
    layer = make_layer(
        size.H, size.K, size.V, num_kv_heads=size.N if size.N < size.H else None, feature_map_=phi,
        update_rule="gated", normalize=False, scale=size.K**-0.5,
    )  # fmt: skip
    y = build.attention(layer, q, k, v, g)
    fused = f"{at}.g_norm_swish_gate"
    build.norm(fused if f"{fused}.weight" in tensors else f"{at}.g_norm", y, y, size.V, eps, groups=size.H)
    if config.take("use_output_gate", True, bool):
        gate = build.linear(f"{at}.g_proj", "x", hidden, size.H * size.V)
        config.only("gate_fn", "swish", "silu")
        build.act_multiply("swish", gate, y, y, size.H * size.V)
    build.linear(f"{at}.o_proj", y, size.H * size.V, hidden, add_to="h")
    return layer


ARCHITECTURES: dict[str, Callable[[Config, Assembly, int], Layer]] = {"linear_attn": linear_attn, "gla": gla}
