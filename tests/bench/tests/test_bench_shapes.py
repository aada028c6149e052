"""Tests the parameter shapes of the models of `thalweg bench step`."""

import pytest

from thalweg_bench.shapes import MODELS, count_elements, shapes_of, transformer_blocks

# These are the documented elements of torchvision's resnet50 and swin_t and of bert-base-uncased;
# tensors are counted by layer: 2 per norm or linear layer with bias, 1 per convolution, plus Swin's
# 12 tables.
KNOWN = {
    "resnet50": (25_557_032, 161),
    "bert-base": (109_482_240, 199),
    "swin-t": (28_288_354, 173),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_as_many_elements_and_tensors_as_the_originals(model):
    shapes = shapes_of(model)
    assert (count_elements(shapes), len(shapes)) == KNOWN[model]


def test_blocks_of_a_transformer_have_its_elements():
    blocks = transformer_blocks(512, 16)
    # 12 w² of matrices, 9 w of their biases and 4 w of two norms.
    assert [count_elements(block) for block in blocks] == [12 * 512**2 + 13 * 512] * 16
