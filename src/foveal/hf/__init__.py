"""Switch a pretrained Hugging Face model to a mechanism or a cache policy, and back.

Needs the extra ``foveal[hf]``.
"""

from __future__ import annotations

from foveal.hf.cache import PolicyCache, nbytes
from foveal.hf.loading import load
from foveal.hf.models import UnsupportedModel
from foveal.hf.switch import Session, use

__all__ = ["PolicyCache", "Session", "UnsupportedModel", "load", "nbytes", "use"]
