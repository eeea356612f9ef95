"""Switch a pretrained Hugging Face model to a mechanism or a cache policy, and back.

Needs the extra ``foveal[hf]``, and transformers from 5.22 to before 5.25: tested on 5.22.0 and 5.24.0.  Before 5.22
the untouched Gemma-2 ignores its soft cap under SDPA, so that the switched model differs from it; from 5.25 on nothing
is known, and models pass their cache under a keyword whose name has changed before.
"""

from __future__ import annotations

from foveal.hf.versions import check

check()

# ruff: noqa: E402  the check explains what an import error would not
from foveal.hf.cache import PolicyCache, nbytes
from foveal.hf.loading import load
from foveal.hf.models import UnsupportedModel
from foveal.hf.switch import Session, use

__all__ = ["PolicyCache", "Session", "UnsupportedModel", "load", "nbytes", "use"]
