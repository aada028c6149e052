"""Half-precision networks by hand, as apex offers them in `apex.fp16_utils`.

`FP16_Optimizer` is all of it in one object; the functions are its parts.
"""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from thalweg.amp.first_generation._fp16_optimizer import FP16_Optimizer
from thalweg.amp.first_generation._fp16_scalers import DynamicLossScaler
from thalweg.amp.first_generation._fp16_scalers import StaticLossScaler as LossScaler
from thalweg.amp.first_generation._networks import (
    BN_convert_float,
    FP16Model,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
