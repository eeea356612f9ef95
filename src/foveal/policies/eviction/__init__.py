"""Policies that drop cached entries for good."""
