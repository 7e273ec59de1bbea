"""Linear attention, token by token, in constant memory: S ← S + φ(k)vᵀ, z ← z + φ(k), y = Sᵀφ(q) / (φ(q)ᵀz)."""

from linattn_edge.attention import LinearAttention, linear_attention, warmup
from linattn_edge.decays import lightning_decay, retnet_decay
from linattn_edge.features import (
    T2R,
    CosFormer,
    Dpfp,
    ElementwiseProduct,
    Elu,
    Favor,
    FeatureMap,
    FunctionMap,
    Hedgehog,
    Identity,
    Polynomial,
    Relu,
    Relu2,
    Rff,
    Taylor,
    feature_map,
)
from linattn_edge.softmax import SoftmaxAttention, SoftmaxState
from linattn_edge.state import State

__version__ = "0.1.0"

__all__ = [
    "T2R",
    "CosFormer",
    "Dpfp",
    "ElementwiseProduct",
    "Elu",
    "Favor",
    "FeatureMap",
    "FunctionMap",
    "Hedgehog",
    "Identity",
    "LinearAttention",
    "Polynomial",
    "Relu",
    "Relu2",
    "Rff",
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
