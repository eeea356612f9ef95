"""Policies that keep everything and read a part at each step."""
