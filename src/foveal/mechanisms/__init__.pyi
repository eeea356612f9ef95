# Written by tools/generate.py.
from foveal.mechanisms.classic.softmax import Softmax as Softmax
from foveal.mechanisms.linear.linear import Linear as Linear
from foveal.mechanisms.recurrent.delta_rule import DeltaRule as DeltaRule
from foveal.mechanisms.recurrent.gated_delta_rule import GatedDeltaRule as GatedDeltaRule
from foveal.mechanisms.recurrent.gla import GLA as GLA
from foveal.mechanisms.recurrent.mamba2 import Mamba2 as Mamba2
from foveal.mechanisms.recurrent.retention import Retention as Retention
from foveal.mechanisms.sparse.moba import MoBA as MoBA
from foveal.mechanisms.sparse.sliding_window import SlidingWindow as SlidingWindow
from foveal.mechanisms.sparse.sparse_transformer import SparseTransformer as SparseTransformer
