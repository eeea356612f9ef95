"""Compare attention mechanisms and cache policies on a pretrained model and a document.

>>> model, tokenizer = foveal.hf.load()
>>> text, name = foveal.compare.read(None)
>>> result = foveal.compare.run(model, tokenizer, text, methods=["full", "snapkv"], length=1024)
>>> result.measurements[1].recall
Share(found=12, trials=15)

Needs the extra ``foveal[hf]``; tables need ``foveal[cli]``, reports ``foveal[report]``.
"""

from __future__ import annotations

from foveal.compare.document import read
from foveal.compare.methods import candidates
from foveal.compare.results import Comparison, Measurement, Sample, Setup, Share, Spread
from foveal.compare.runner import Plan, Progress, execute, plan, run

__all__ = [
    "Comparison",
    "Measurement",
    "Plan",
    "Progress",
    "Sample",
    "Setup",
    "Share",
    "Spread",
    "candidates",
    "execute",
    "plan",
    "read",
    "run",
]
