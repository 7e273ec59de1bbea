"""Whole models: checkpoints in Hugging Face format, decoding token by token, generation."""

from linattn_edge.models.generate import Sampler
from linattn_edge.models.model import Model, load_model
from linattn_edge.models.state import ModelState

__all__ = ["Model", "ModelState", "Sampler", "load_model"]
