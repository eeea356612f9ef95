"""Softmax attention as it is commonly used."""
