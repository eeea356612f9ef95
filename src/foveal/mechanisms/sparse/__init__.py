"""Softmax over a part of the keys."""
