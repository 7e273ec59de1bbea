"""Whole models: checkpoints in Hugging Face format, decoding token by token, generation."""

from linattn_edge.models.assembly import WEIGHTS
from linattn_edge.models.generate import Sampler
from linattn_edge.models.model import Model, bundled, load_model
from linattn_edge.models.state import ModelState
from linattn_edge.models.tokenizer import Tokenizer, load_tokenizer

__all__ = ["WEIGHTS", "Model", "ModelState", "Sampler", "Tokenizer", "bundled", "load_model", "load_tokenizer"]
