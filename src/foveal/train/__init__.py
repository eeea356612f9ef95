"""Train small models on generated tasks, to see what a mechanism can learn.

>>> task = foveal.train.MQAR(pairs=20)
>>> result = foveal.train.run(task, ["softmax", "delta_rule", "linear"])
>>> [(outcome.mechanism, outcome.accuracy) for outcome in result.outcomes]

Needs nothing but torch; the command ``foveal train`` and tables need the extra ``foveal[cli]``.
"""

from __future__ import annotations

from foveal.train.model import Config, Decoder
from foveal.train.mqar import MQAR
from foveal.train.results import Check, Outcome, Run
from foveal.train.runner import Progress, Recipe, run, train
from foveal.train.task import IGNORED, Task, get, names

__all__ = [
    "IGNORED",
    "MQAR",
    "Check",
    "Config",
    "Decoder",
    "Outcome",
    "Progress",
    "Recipe",
    "Run",
    "Task",
    "get",
    "names",
    "run",
    "train",
]
