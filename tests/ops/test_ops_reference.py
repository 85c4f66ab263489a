"""The helpers that the bucket operators' tests compare and limit kernels with."""

from __future__ import annotations

import math

import pytest
import torch
from ops_reference import assert_same_bits, cpu_level

import torch_commhook.native.bucket_ops as ops


def test_assert_same_bits_can_fail():
    ones = torch.ones(3)
    assert_same_bits(torch.tensor([math.nan, 0.0]), torch.tensor([-math.nan, 0.0]))
    for other in (torch.tensor([1.0, 1.0, 1.0 + 2**-23]), ones.double(), torch.ones(1, 3)):
        with pytest.raises(AssertionError):
            assert_same_bits(other, ones)
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ, the first at \(0,\): -0.0"):
        assert_same_bits(torch.tensor([-0.0]), torch.tensor([0.0]))


def test_cpu_level_is_restored():
    before = ops.cpu_capability()
    with cpu_level("default"):
        assert ops.cpu_capability() == "default"
    assert ops.cpu_capability() == before
