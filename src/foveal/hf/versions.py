"""Which releases of transformers the switch is known to work with."""

from __future__ import annotations

import importlib.metadata
import re
import warnings

FIRST, BEFORE = (5, 22), (5, 25)


def check() -> None:
    """Refuse a transformers that is missing or older than tested, warn about a newer one.

    Raises:
        ImportError: naming the version found and the range that is expected.
    """
    wanted = f"transformers >= {FIRST[0]}.{FIRST[1]}, < {BEFORE[0]}.{BEFORE[1]}: pip install 'foveal[hf]'"
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"foveal.hf needs {wanted}") from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else FIRST
    if release < FIRST:
        raise ImportError(f"foveal.hf: transformers is {found}, expected {wanted}")
    if release >= BEFORE:
        warnings.warn(f"foveal.hf: transformers is {found}, tested is {wanted}", UserWarning, stacklevel=3)
