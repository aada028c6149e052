"""The lists of O1, which say which functions compute in which type. `_functions` applies them.

A name without a counterpart in the installed torch is passed over. What torch itself promotes
(additions, comparisons, `cat`, `stack`, `where`, …) is not replaced.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
import torch.nn.functional

# Products of matrices: fast in a half type, and accumulated in float32 by the hardware.
HALF: Final = {
    "torch": """
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu
        addmm addmv addr matmul mm mv bmm addbmm baddbmm chain_matmul einsum tensordot inner
    """,
    "torch.nn.functional": """
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear
        prelu scaled_dot_product_attention
    """,
    "torch.linalg": "matmul multi_dot vecdot",
    "torch.Tensor": """
        __matmul__ __rmatmul__ addmm addmv addr matmul mm mv bmm addbmm baddbmm inner
    """,
}

# What overflows, or cancels, in a half type: exponentials, powers, sums, norms and losses.
_POINTWISE = """
    acos acosh asin asinh atanh cosh sinh tan erfinv exp exp2 expm1 log log10 log1p log2 pow
    float_power reciprocal rsqrt logit
"""
_SUMS = """
    cumprod cumsum logcumsumexp logsumexp dist norm prod nansum std sum var renorm softmax
    log_softmax
"""
FLOAT: Final = {
    "torch": f"""
        {_POINTWISE} {_SUMS} std_mean var_mean cdist cosine_similarity layer_norm group_norm
        rms_norm logaddexp logaddexp2
    """,
    "torch.nn.functional": """
        softmax softmin log_softmax logsigmoid softplus gelu
        layer_norm group_norm local_response_norm rms_norm normalize cosine_similarity
        pairwise_distance pdist interpolate upsample grid_sample embedding_bag
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss
        gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
        mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
        triplet_margin_with_distance_loss
    """,
    "torch.linalg": "norm vector_norm matrix_norm cond det slogdet inv solve",
    "torch.Tensor": f"{_POINTWISE} {_SUMS} __pow__ __rpow__ cpu",
}

# Arguments of different types are refused by torch: all are cast to the widest.
PROMOTE: Final = {
    "torch": "bilinear cross dot vdot index_add scatter_add",
    "torch.nn.functional": "bilinear",
    "torch.linalg": "cross",
    "torch.Tensor": "cross dot vdot index_add scatter_add",
}

# Written in place: the other arguments are cast to the type of the target …
IN_PLACE: Final = {
    "torch.Tensor": "addmm_ addmv_ addr_ addbmm_ baddbmm_ index_add_ scatter_add_ index_copy_",
}
# … and these are refused where the target is in a half type, because float32 does not fit in.
IN_PLACE_FLOAT: Final = {
    "torch.Tensor": """
        acos_ acosh_ asin_ asinh_ atanh_ cosh_ sinh_ tan_ erfinv_ exp_ exp2_ expm1_ log_ log10_
        log1p_ log2_ pow_ float_power_ reciprocal_ rsqrt_ logit_ cumprod_ cumsum_ renorm_ __ipow__
    """,
}

BANNED: Final = {
    "binary_cross_entropy": (
        "binary_cross_entropy was given half-precision probabilities, expected float32: they round "
        "to 0 or 1, whose logarithm is infinite. Use binary_cross_entropy_with_logits on what the "
        "sigmoid is given, cast with .float(), or pass allow_banned=True to amp.init()"
    )
}

RNNS: Final = """
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""


def namespaces() -> dict[str, ModuleType | type]:
    """Returns the modules and classes that the keys of the lists stand for."""
    return {
        "torch": torch,
        "torch.nn.functional": torch.nn.functional,
        "torch.linalg": torch.linalg,
        "torch.Tensor": torch.Tensor,
    }
