"""Bare loops. Nothing here checks its input: `attention.py` and `softmax.py` do, before they call."""
