"""The one table of what `thalweg.compat.apex` provides: modules of apex, their names, our sources.

`docs/amp.md` shows it, and tests hold both together. A name that is not here raises ImportError
with a sentence of `INSTEAD`.
"""

from __future__ import annotations

from typing import Final

_AMP = "thalweg.amp"
_HERE = "thalweg.compat._apex"
_NETWORKS = """
    BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads
    master_params_to_model_params tofp16 to_python_float clip_grad_norm convert_module
    convert_network FP16Model
"""
_SYNC_BN = "SyncBatchNorm convert_syncbn_model create_syncbn_process_group"
_NORMS = "FusedLayerNorm MixedFusedLayerNorm FusedRMSNorm MixedFusedRMSNorm"
_CASTS = """
    init half_function float_function promote_function register_half_function
    register_float_function register_promote_function
"""

# Module of apex: our module: the names that it has.
PROVIDED: Final[dict[str, dict[str, str]]] = {
    "apex": {f"{_HERE}_misc": "DeprecatedFeatureWarning deprecated_warning"},
    "apex.amp": {
        _AMP: f"""
            {_CASTS} scale_loss disable_casts initialize state_dict load_state_dict master_params
            _amp_state rnn_cast AmpHandle NoOpHandle OptimWrapper LossScaler FP16_Optimizer
            DynamicLossScaler
        """,
    },
    "apex.amp._amp_state": {
        _AMP: "_amp_state master_params",
        f"{_HERE}_misc": "maybe_print warn_or_err",
    },
    "apex.amp.amp": {_AMP: f"{_CASTS} AmpHandle NoOpHandle"},
    "apex.amp.frontend": {_AMP: "initialize state_dict load_state_dict _amp_state"},
    "apex.amp.handle": {_AMP: "scale_loss disable_casts AmpHandle NoOpHandle"},
    "apex.amp.opt": {_AMP: "OptimWrapper"},
    "apex.amp.scaler": {_AMP: "LossScaler"},
    "apex.fp16_utils": {
        f"{_AMP}.fp16_utils": f"{_NETWORKS} FP16_Optimizer LossScaler DynamicLossScaler",
    },
    "apex.fp16_utils.fp16util": {f"{_AMP}.fp16_utils": _NETWORKS},
    "apex.fp16_utils.fp16_optimizer": {f"{_AMP}.fp16_utils": "FP16_Optimizer"},
    "apex.fp16_utils.loss_scaler": {f"{_AMP}.fp16_utils": "LossScaler DynamicLossScaler"},
    "apex.optimizers": {
        f"{_HERE}_optimizers": "FusedAdam FusedLAMB FusedSGD",
        f"{_HERE}_optimizers_more": "FusedNovoGrad FusedAdagrad FusedMixedPrecisionLamb",
    },
    "apex.optimizers.fused_adam": {f"{_HERE}_optimizers": "FusedAdam"},
    "apex.optimizers.fused_lamb": {f"{_HERE}_optimizers": "FusedLAMB"},
    "apex.optimizers.fused_sgd": {f"{_HERE}_optimizers": "FusedSGD"},
    "apex.optimizers.fused_novograd": {f"{_HERE}_optimizers_more": "FusedNovoGrad"},
    "apex.optimizers.fused_adagrad": {f"{_HERE}_optimizers_more": "FusedAdagrad"},
    "apex.optimizers.fused_mixed_precision_lamb": {
        f"{_HERE}_optimizers_more": "FusedMixedPrecisionLamb",
    },
    "apex.parallel": {
        f"{_HERE}_parallel": "DistributedDataParallel",
        f"{_HERE}_reducer": "Reducer",
        f"{_HERE}_batch_norm": _SYNC_BN,
        f"{_HERE}_larc": "LARC",
        "torch.distributed": "ReduceOp",
    },
    "apex.parallel.distributed": {
        f"{_HERE}_parallel": "DistributedDataParallel",
        f"{_HERE}_reducer": "Reducer",
    },
    "apex.parallel.LARC": {f"{_HERE}_larc": "LARC"},
    "apex.parallel.multiproc": {"thalweg.compat.multiproc": "main"},
    "apex.parallel.optimized_sync_batchnorm": {f"{_HERE}_batch_norm": "SyncBatchNorm"},
    "apex.parallel.sync_batchnorm": {f"{_HERE}_batch_norm": "SyncBatchNorm"},
    "apex.normalization": {f"{_HERE}_normalization": _NORMS},
    "apex.normalization.fused_layer_norm": {
        f"{_HERE}_normalization": f"""
            {_NORMS} fused_layer_norm fused_layer_norm_affine mixed_dtype_fused_layer_norm_affine
            fused_rms_norm fused_rms_norm_affine mixed_dtype_fused_rms_norm_affine manual_rms_norm
        """,
    },
    "apex.multi_tensor_apply": {
        f"{_HERE}_multi_tensor": "MultiTensorApply multi_tensor_applier",
    },
    "apex.multi_tensor_apply.multi_tensor_apply": {f"{_HERE}_multi_tensor": "MultiTensorApply"},
    "apex.reparameterization": {
        f"{_HERE}_weight_norm": "apply_weight_norm remove_weight_norm WeightNorm",
    },
    "apex.RNN": {f"{_HERE}_rnn": "LSTM GRU ReLU Tanh mLSTM"},
    "apex.RNN.models": {f"{_HERE}_rnn": "LSTM GRU ReLU Tanh mLSTM"},
    "apex.RNN.RNNBackend": {f"{_HERE}_rnn": "RNNCell stackedRNN bidirectionalRNN"},
    "amp_C": {
        f"{_HERE}_multi_tensor": """
            multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp
            multi_tensor_l2norm_scale multi_tensor_unscale_l2norm update_scale_hysteresis
        """,
        f"{_HERE}_multi_tensor_lamb": """
            multi_tensor_lamb multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda
            multi_tensor_lamb_stage2_cuda
        """,
        f"{_HERE}_multi_tensor_steps": """
            multi_tensor_sgd multi_tensor_adam multi_tensor_adam_capturable
            multi_tensor_adam_capturable_master multi_tensor_adagrad multi_tensor_novograd
        """,
    },
    "apex_C": {f"{_HERE}_misc": "flatten unflatten"},
}

# Modules that `python -m` runs, each with ours.
PROGRAMS: Final = {"apex.parallel.multiproc": "thalweg.compat.multiproc"}

# What apex has as well, and what to use in its place. A module's sentence is also that of all
# inside it that has none.
INSTEAD: Final[dict[str, str]] = {
    "apex.contrib": "use torch's functions: scaled_dot_product_attention, cross_entropy, …",
    "apex.contrib.optimizers": "use apex.optimizers, or torch's ZeroRedundancyOptimizer",
    "apex.contrib.clip_grad": "use torch.nn.utils.clip_grad_norm_",
    "apex.contrib.layer_norm": "use apex.normalization or torch.nn.LayerNorm",
    "apex.contrib.groupbn": "use apex.parallel.SyncBatchNorm(channel_last=True)",
    "apex.contrib.xentropy": "use torch.nn.functional.cross_entropy(label_smoothing=…)",
    "apex.contrib.multihead_attn": "use torch.nn.MultiheadAttention",
    "apex.contrib.fmha": "use torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.sparsity": "use torch.sparse.to_sparse_semi_structured",
    "apex.transformer": "use Megatron-LM, whose core has it now, or torch.distributed.tensor",
    "apex.mlp": "use torch.nn.Sequential of Linear and activations",
    "apex.fused_dense": "use torch.nn.Linear",
    "apex.pyprof": "use torch.profiler, or thalweg profile",
    "apex.optimizers.FP16_Optimizer": "use apex.fp16_utils.FP16_Optimizer",
    "apex.amp.lists": "use apex.amp.register_half_function and register_float_function",
    "apex.amp.wrap": "use apex.amp.register_half_function and register_float_function",
    "apex.fp16_utils.Fused_Weight_Norm": "use apex.reparameterization.apply_weight_norm",
    "apex.reparameterization.reparameterization": "use torch.nn.utils.parametrize",
    "amp_C": "use apex.optimizers, whose steps call what takes its place",
    "apex": "docs/amp.md lists what Thalweg provides",
}


def names_of(module: str) -> dict[str, str]:
    """Returns the names of a module of apex, each with our module that has it."""
    sources = PROVIDED.get(module, {}).items()
    return {name: source for source, names in sources for name in names.split()}


def parts_of(module: str) -> list[str]:
    """Returns the names of the modules right inside a module of apex."""
    found = (other.rpartition(".") for other in PROVIDED)
    return [name for parent, _, name in found if parent == module]


def why_missing(name: str) -> str:
    """Returns a sentence about a dotted name that is not provided: what to use instead."""
    known = name
    while known not in INSTEAD and "." in known:
        known = known.rpartition(".")[0]
    instead = INSTEAD.get(known, INSTEAD["apex"])
    return f"thalweg.compat.apex does not provide {name}: {instead}"
