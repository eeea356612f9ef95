# Written by tools/generate.py.
from foveal.policies.eviction.h2o import H2O as H2O
from foveal.policies.eviction.knorm import KNorm as KNorm
from foveal.policies.eviction.random import Random as Random
from foveal.policies.eviction.snapkv import SnapKV as SnapKV
from foveal.policies.eviction.streaming_llm import StreamingLLM as StreamingLLM
from foveal.policies.eviction.tova import TOVA as TOVA
from foveal.policies.retrieval.quest import Quest as Quest
