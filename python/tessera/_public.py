"""The names of the package, all of which need torch."""

from tessera import _C, _native
from tessera._checkpoint import LoadedCheckpoint, has_checkpoint, load_checkpoint, save_checkpoint
from tessera._module import (
    FSDPModule,
    full_gradients,
    full_parameters,
    fully_shard,
    register_fsdp_forward_method,
)
from tessera._optim import (
    SGD,
    AdamW,
    GradScaler,
    Muon,
    OptimizerRule,
    clip_grad_norm_,
    gradient_norm,
    nonfinite_parameters,
)
from tessera._optim_state import get_optimizer_state_dict, set_optimizer_state_dict
from tessera._options import StateDictOptions
from tessera._parameter import ShardedGradient, ShardedParameter
from tessera._policy import (
    BufferContract,
    MixedPrecisionPolicy,
    ModelContract,
    ParameterContract,
    Rule,
    UnitContract,
)
from tessera._state import get_model_state_dict, set_model_state_dict
from tessera._world import Error, Mesh, World, init, world

__version__ = _native.version()
UnshardHandle = _C.UnshardHandle

__all__ = [
    "SGD",
    "AdamW",
    "BufferContract",
    "Error",
    "FSDPModule",
    "GradScaler",
    "LoadedCheckpoint",
    "Mesh",
    "MixedPrecisionPolicy",
    "ModelContract",
    "Muon",
    "OptimizerRule",
    "ParameterContract",
    "Rule",
    "ShardedGradient",
    "ShardedParameter",
    "StateDictOptions",
    "UnitContract",
    "UnshardHandle",
    "World",
    "__version__",
    "clip_grad_norm_",
    "full_gradients",
    "full_parameters",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "gradient_norm",
    "has_checkpoint",
    "init",
    "load_checkpoint",
    "nonfinite_parameters",
    "register_fsdp_forward_method",
    "save_checkpoint",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "world",
]
