"""Linear attention, token by token, in constant memory: S ← S + φ(k)vᵀ, z ← z + φ(k), y = Sᵀφ(q) / (φ(q)ᵀz)."""

from linattn_edge import features
from linattn_edge.approximation import SoftmaxError, softmax_error
from linattn_edge.attention import LinearAttention, linear_attention, warmup
from linattn_edge.decays import lightning_decay, retnet_decay
from linattn_edge.features import *  # noqa: F403  (each map: features.__all__)
from linattn_edge.models import Model, ModelState, load_model
from linattn_edge.pieces import merge, parallel_prefill
from linattn_edge.softmax import SoftmaxAttention, SoftmaxState
from linattn_edge.state import State
from linattn_edge.streams import PoolStatistics, StreamPool

__version__ = "0.1.0"

__all__ = [
    "LinearAttention",
    "Model",
    "ModelState",
    "PoolStatistics",
    "SoftmaxAttention",
    "SoftmaxError",
    "SoftmaxState",
    "State",
    "StreamPool",
    "__version__",
    "lightning_decay",
    "linear_attention",
    "load_model",
    "merge",
    "parallel_prefill",
    "retnet_decay",
    "softmax_error",
    "warmup",
]
__all__ += features.__all__
