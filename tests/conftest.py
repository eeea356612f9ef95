"""What every test starts from: no network, fixed seeds, one thread per worker, and memory that shows if it is read."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _threads():
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """New memory is NaN, so that a value nobody wrote cannot pass for 0."""
    torch.manual_seed(0)
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poison(x):
        return x.fill_(float("nan")) if x.is_floating_point() and x.device.type == "cpu" else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
