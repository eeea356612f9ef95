import pytest
import torch

from tests.compare import tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny products gain nothing from threads, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def model():
    return tiny.make("llama")
