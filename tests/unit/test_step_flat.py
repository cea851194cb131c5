"""The flat buffers: layout, stacks of equal matrices, and sums of gradients in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftmill.step.flat import ALIGNMENT, FlatParameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("a", (4, 6)), ("v", (5,)), ("b", (3, 9)), ("c", (4, 6)), ("w", (70,))):
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def test_matrices_come_first_equal_shapes_side_by_side() -> None:
    flat = FlatParameters(Net(), "cpu", torch.bfloat16)
    assert list(flat.places) == ["b", "a", "c", "v", "w"]
    assert flat.num_matrix_elements == 3 * ALIGNMENT
    assert flat.size == 6 * ALIGNMENT
    assert all(place.offset % ALIGNMENT == 0 for place in flat.places.values())


def test_stacks_of_equal_matrices_are_views() -> None:
    net = Net()
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    flat = FlatParameters(net, "cpu", torch.float32)
    stacks = flat.equal_matrices(flat.master)
    assert [tuple(stack.shape) for stack in stacks] == [(1, 3, 9), (2, 4, 6)]
    assert torch.equal(stacks[1], torch.stack([expected["a"], expected["c"]]))
    stacks[1].fill_(2.0)
    assert torch.equal(net.c, torch.full((4, 6), 2.0))
    assert torch.equal(net.b, expected["b"])


def test_named_tensors_of_a_part() -> None:
    flat = FlatParameters(Net(), "cpu", torch.float32)
    middle = flat.num_matrix_elements
    assert set(flat.named(flat.master[:middle])) == {"a", "b", "c"}
    vectors = flat.named(flat.master[middle:], middle)
    assert set(vectors) == {"v", "w"}
    assert torch.equal(vectors["w"], flat.view(flat.master, "w"))


def test_a_missing_or_misshapen_tensor_is_named() -> None:
    flat = FlatParameters(Net(), "cpu", torch.float32)
    tensors = {name: tensor.clone() for name, tensor in flat.named(flat.master).items()}
    with pytest.raises(ValueError, match=r"tensor w: expected shape \(70,\), got shape \(7,\)"):
        flat.load({**tensors, "w": torch.zeros(7)})
    del tensors["v"]
    with pytest.raises(ValueError, match=r"tensor v: expected shape \(5,\), got nothing"):
        flat.load(tensors)


def batches(flat: FlatParameters, net: Net) -> None:
    """A large gradient, and 64 that bfloat16 would lose beside it: 256 + 64 x 0.5."""
    flat.clear_gradient()
    for value in (256.0, *[0.5] * 64):
        net.a.grad.add_(value)
        flat.add_gradient()


def test_a_sum_in_float32_loses_no_batch() -> None:
    net = Net()
    flat = FlatParameters(net, "cpu", torch.bfloat16)
    batches(flat, net)
    assert flat.gradient_sum is flat.gradient
    assert float(flat.view(flat.gradient_sum, "a")[0, 0]) == 256.0, "what the compute type makes of it"
    flat.sum_in_float32()
    for _ in range(2):
        batches(flat, net)
        assert flat.gradient_sum.dtype == torch.float32
        assert torch.equal(flat.view(flat.gradient_sum, "a"), torch.full((4, 6), 288.0))
        assert not flat.gradient.any(), "the next batch adds to nothing"


def test_a_compute_type_of_float32_needs_no_second_sum() -> None:
    flat = FlatParameters(Net(), "cpu", torch.float32)
    flat.sum_in_float32()
    assert flat.gradient_sum is flat.gradient
