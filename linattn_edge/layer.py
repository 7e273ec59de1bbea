"""Layer: the configuration that gives a state its shape and meaning, checked once and then fixed."""

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.arrays import flag, real_array, whole
from linattn_edge.errors import ShapeError, StateMismatchError
from linattn_edge.features import FeatureMap, feature_map
from linattn_edge.rules import RULES, Rule

FORMAT_VERSION = "1"
_TINY = float(np.finfo(np.float32).tiny)


def _real(name: str, value: Any, what: str, least: float) -> float:
    """A finite number whose size float32 can hold: at least `least`, at most float32's largest."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name}: expected {what}, got {value!r}")
    return number


def scale_value(value: Any) -> float:
    """A scale: not 0, and neither too small nor too large for float32."""
    return _real("scale", value, "a number other than 0 in the range of float32", _TINY)


@dataclass(frozen=True, eq=False)
class Layer:
    """Sizes, rule, feature map and constants of one attention layer; two layers with the same ones are equal.

    H query heads, HK key heads, N state heads, widths K, V and F; see `LinearAttention` for what each option means.
    """

    H: int
    HK: int
    N: int
    K: int
    V: int
    F: int
    phi: FeatureMap
    rule: Rule
    normalize: bool
    scale: float
    qk_norm: bool
    decay: NDArray[np.float64] | None  # [N, 1] or [N, F]
    eps: float
    eps_mode: str
    weights: NDArray[np.float64] = field(repr=False)  # φ's, [sides, heads, P]
    fingerprint: str = field(default="", repr=False)

    @property
    def outputs(self) -> int:
        """Heads of the output."""
        return max(self.H, self.N)

    def config(self) -> dict[str, Any]:
        """The configuration as JSON values; arrays (`arrays()`) are named by their digest."""
        return {
            "num_heads": self.H,
            "num_kv_heads": self.N if self.N < self.H else None,
            "num_value_heads": self.N if self.N > self.H else None,
            "key_dim": self.K,
            "value_dim": self.V,
            "feature_map": self.phi.config(),
            "update_rule": self.rule.name,
            "normalize": self.normalize,
            "scale": self.scale,
            "qk_norm": self.qk_norm,
            "eps": self.eps,
            "eps_mode": self.eps_mode,
            "arrays": {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in self.arrays().items()},
        }

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """What the configuration holds besides JSON values."""
        arrays = {} if self.decay is None else {"decay": self.decay}
        return arrays | ({"feature_map.weights": self.weights} if self.phi.given else {})

    def metadata(self) -> dict[str, str]:
        """The header of a saved file."""
        return {"format_version": FORMAT_VERSION, "layer": json.dumps(self.config(), sort_keys=True)}

    def check_metadata(self, metadata: Mapping[str, str] | None, path: Any) -> None:
        """Refuse a file that another configuration wrote, naming every difference."""
        theirs = read_metadata(metadata, path)
        mine = self.config()
        differences = [
            f"{name}: {path} has {theirs.get(name)!r}, the layer has {mine[name]!r}"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
        if differences:
            raise StateMismatchError("the file belongs to another layer: " + "; ".join(differences))

    def describe_difference(self, other: "Layer") -> str:
        """Where two configurations differ, in one line."""
        mine, theirs = self.config(), other.config()
        return "; ".join(f"{n}: {theirs[n]!r} instead of {mine[n]!r}" for n in mine if mine[n] != theirs[n])


def read_metadata(metadata: Mapping[str, str] | None, path: Any) -> dict[str, Any]:
    """The configuration in a saved file's header; refuses headers that are not ours or of a later format."""
    version = (metadata or {}).get("format_version")
    if metadata is None or version is None or "layer" not in metadata:
        raise StateMismatchError(f"{path}: not a linattn_edge file (no format_version and layer in its metadata)")
    if version != FORMAT_VERSION:
        raise StateMismatchError(f"{path}: format_version {version!r} is not readable; expected {FORMAT_VERSION!r}")
    try:
        config = json.loads(metadata["layer"])
    except (json.JSONDecodeError, RecursionError) as error:
        raise StateMismatchError(f"{path}: the layer in its metadata is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise StateMismatchError(f"{path}: the layer in its metadata is not an object")
    return config


def make_layer(
    num_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    *,
    num_kv_heads: int | None = None,
    num_value_heads: int | None = None,
    feature_map_: str | FeatureMap = "elu",
    update_rule: str = "linear",
    normalize: bool | None = None,
    scale: float | None = None,
    qk_norm: bool = False,
    decay: ArrayLike | None = None,
    eps: float = 1e-30,
    eps_mode: str = "clamp",
) -> Layer:
    """Check a configuration and fill in its defaults."""
    H, K = whole("num_heads", num_heads, 1), whole("key_dim", key_dim, 1)
    V = K if value_dim is None else whole("value_dim", value_dim, 1)
    if num_kv_heads is not None and num_value_heads is not None:
        raise ValueError("num_kv_heads and num_value_heads: give one (GQA or GVA), not both")
    N = H
    if num_kv_heads is not None:
        N = whole("num_kv_heads", num_kv_heads, 1)
        if H % N:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {H}, got {N}")
    if num_value_heads is not None:
        N = whole("num_value_heads", num_value_heads, 1)
        if N % H:
            raise ValueError(f"num_value_heads: expected a multiple of num_heads = {H}, got {N}")
    HK = min(H, N)
    phi = feature_map(feature_map_)
    F = phi.checked_dim(K)
    phi.check_layer(K, H, HK)
    if not isinstance(update_rule, str) or update_rule not in RULES:
        raise ValueError(f"update_rule: expected one of {', '.join(RULES)}; got {update_rule!r}")
    rule = RULES[update_rule]
    if normalize is None:
        normalize = rule.name == "linear" and phi.positive
    normalize = flag("normalize", normalize)
    if normalize and not rule.normaliser:
        raise ValueError(f"normalize: {rule.name!r} has no normaliser z; use normalize=False")
    if scale is None:
        scale = 1.0 if normalize else K**-0.5
    elif normalize:
        raise ValueError("scale: would cancel under normalize=True; give one of the two")
    scale = scale_value(scale)
    if not isinstance(eps_mode, str) or eps_mode not in ("clamp", "add"):
        raise ValueError(f"eps_mode: expected 'clamp' or 'add', got {eps_mode!r}")
    least = _TINY if eps_mode == "clamp" else 0.0
    what = f"a number of at least {least:.3g}" + (" (float32's smallest)" if least else "")
    if _real("eps", eps, what, least) < 0:
        raise ValueError(f"eps: expected {what}, got {eps!r}")
    log_decay = None if decay is None else _decay(decay, rule, N, F)
    weights = phi.weights(K)
    largest = float(np.finfo(np.float32).max)
    if np.abs(weights).max(initial=0) > largest or phi.limit(K, largest) < (1 if qk_norm else _TINY):
        which = "unit vectors" if qk_norm else "every vector"
        raise ValueError(f"feature_map: the numbers of {phi!r} take {which} beyond the range of float32")
    layer = Layer(
        H, HK, N, K, V, F, phi, rule, normalize, scale, flag("qk_norm", qk_norm), log_decay, float(eps), eps_mode,
        weights,
    )  # fmt: skip
    digest = hashlib.sha256(json.dumps(layer.config(), sort_keys=True).encode()).hexdigest()
    object.__setattr__(layer, "fingerprint", sys.intern(digest))  # so that comparing two is comparing two pointers
    return layer


def _decay(decay: ArrayLike, rule: Rule, N: int, F: int) -> NDArray[np.float64]:
    if not rule.decay:
        raise ValueError(f"decay: {rule.name!r} takes none; use 'gated' or 'gated_delta'")
    array = np.array(real_array("decay", decay), np.float64)
    if array.shape not in ((N,), (N, F)):
        raise ShapeError(
            f"decay: expected log decays of shape [N] = [{N}] or [N, F] = [{N}, {F}], got {list(array.shape)}"
        )
    if not (array <= 0).all():  # NaN too
        raise ValueError(
            f"decay: expected log decays, which are at most 0 (log(0.9), not 0.9); the largest is {array.max()}"
        )
    array = np.maximum(array, -np.finfo(np.float32).max, where=array != -np.inf, out=array)
    array = array.reshape(N, -1)
    array.flags.writeable = False
    return array
