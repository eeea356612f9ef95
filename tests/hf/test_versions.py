"""The range of transformers is said, not found out."""

import importlib.metadata

import pytest

from foveal.hf import versions


@pytest.mark.parametrize(
    ("found", "message"),
    [("5.21.3", "transformers is 5.21.3, expected transformers >= 5.22, < 5.25"), ("4.57", "is 4.57")],
)
def test_older_releases_are_refused(monkeypatch, found, message):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(ImportError, match=message):
        versions.check()


def test_newer_releases_are_warned_about(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.25.0")
    with pytest.warns(UserWarning, match="transformers is 5.25.0, tested is"):
        versions.check()


def test_a_missing_one_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"foveal\.hf needs transformers"):
        versions.check()
