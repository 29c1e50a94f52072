"""Training that wins back what pruning cost: a sparse student, its dense teacher, any text."""

from .capture import Layout as Layout
from .fit import StepCallback as StepCallback
from .low_rank import LowRank as LowRank
from .low_rank import LowRankCost as LowRankCost
from .low_rank import low_rank_cost as low_rank_cost
from .machine import Machine as Machine
from .machine import open_machine as open_machine
from .optimizers import OptimizerFactory as OptimizerFactory
from .optimizers import adamw as adamw
from .options import RecoverOptions as RecoverOptions
from .run import Recovered as Recovered
from .run import Task as Task
from .run import recover as recover
from .state import STATE_FILE as STATE_FILE
from .state import StateFile as StateFile
from .state import Trajectory as Trajectory
from .storage import Storage as Storage
from .teacher import cache_bytes as cache_bytes
from .windows import Corpus as Corpus
