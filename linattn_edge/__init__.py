"""Linear attention, token by token, in constant memory: S ← S + φ(k)vᵀ, z ← z + φ(k), y = Sᵀφ(q) / (φ(q)ᵀz)."""

from linattn_edge.attention import LinearAttention, linear_attention, warmup
from linattn_edge.decays import lightning_decay, retnet_decay
from linattn_edge.features import (
    Dpfp,
    Elu,
    FeatureMap,
    Identity,
    Polynomial,
    Relu,
    Relu2,
    Taylor,
    feature_map,
)
from linattn_edge.softmax import SoftmaxAttention, SoftmaxState
from linattn_edge.state import State

__version__ = "0.1.0"

__all__ = [
    "Dpfp",
    "Elu",
    "FeatureMap",
    "Identity",
    "LinearAttention",
    "Polynomial",
    "Relu",
    "Relu2",
    "SoftmaxAttention",
    "SoftmaxState",
    "State",
    "Taylor",
    "__version__",
    "feature_map",
    "lightning_decay",
    "linear_attention",
    "retnet_decay",
    "warmup",
]
