"""Dense weights in, dense weights with zeros out: knows torch, no kernel, no model library."""

from .activations import Activations as Activations
from .activations import advance as advance
from .activations import capture_inputs as capture_inputs
from .activations import quiet as quiet
from .activations import without_cache as without_cache
from .admm import admm as admm
from .compensation import HessianFactor as HessianFactor
from .compensation import factor_hessian as factor_hessian
from .compensation import sparsegpt as sparsegpt
from .fit import output_error as output_error
from .gather import Gatherer as Gatherer
from .layer import prune_layer as prune_layer
from .mask import keep_mask as keep_mask
from .order import is_chain as is_chain
from .order import trace_groups as trace_groups
from .permute import kept_importance as kept_importance
from .permute import spread_columns as spread_columns
from .recipe import METHODS as METHODS
from .recipe import LayerReport as LayerReport
from .recipe import Recipe as Recipe
from .reference import Reference as Reference
from .refit import refit as refit
from .scores import magnitude as magnitude
from .scores import wanda as wanda
from .statistics import Statistics as Statistics
from .stream import prune_block as prune_block
