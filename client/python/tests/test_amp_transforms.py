"""Tests O1 under the transforms of torch.func, beside autograd."""

import pytest
import torch
from amp_models import casts_off_afterwards, setup
from torch import nn, optim
from torch.func import functional_call, grad, jacrev, vmap

from thalweg.amp._casts import casting

X = torch.arange(12.0).reshape(3, 4) / 8


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def cast_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    setup(model, optim.SGD(model.parameters(), lr=0.1), "O1", half_dtype=torch.bfloat16)
    return model


def grads_of(model):
    model.zero_grad()
    model(X).sum().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def of_params(model):
    return grad(lambda params: functional_call(model, params, (X,)).sum())(
        dict(model.named_parameters())
    )


def of_each_sample(model):
    def loss(params, sample):
        return functional_call(model, params, (sample,)).sum()

    each = vmap(grad(loss), (None, 0))(dict(model.named_parameters()), X)
    return {name: gradient.sum(0) for name, gradient in each.items()}


def close(ours, expected):
    # Sums of three numbers, each rounded to bfloat16 on its way.
    return all(torch.allclose(ours[n], expected[n], rtol=2.0**-6, atol=2.0**-6) for n in expected)


@pytest.mark.parametrize("transform", [of_params, of_each_sample])
def test_gradients_through_parameters_are_autograds(transform):
    model = cast_model()
    assert close(transform(model), grads_of(model))


def test_jacobian_is_made_of_autograds_gradients():
    model = cast_model()
    inputs = X.clone().requires_grad_()
    model(inputs).sum().backward()
    jacobian = jacrev(model)(X).sum((0, 1))
    assert torch.allclose(jacobian, inputs.grad, rtol=2.0**-6, atol=2.0**-6)


def test_copies_made_within_a_transform_are_not_kept():
    model = cast_model()
    jacrev(model)(X)
    assert len(casting.cache) == 0
    assert close(grads_of(model), of_params(model))
