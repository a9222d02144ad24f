"""Soft targets on a stand-in GPU: admitted in a child process, then used."""

from __future__ import annotations

import pytest
import torch

import fastaug
from fastaug.kernels.admission import check_admission
from fastaug.kernels.registry import load_kernel

STAND_INS = {"devices": 1, "functional": True}


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_a_kernel_is_admitted_and_right(kernel: str) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 4, 10), torch.rand(3, 10, dtype=torch.float64)
    found = []
    for device, name in (("cuda", kernel), ("cpu", "reference")):
        z = logits.to(device).requires_grad_()
        terms = fastaug.objective(z, targets.to(device), kernel=name)
        found.append([part.detach().cpu() for part in (*terms, *torch.autograd.grad(terms[0], z))])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    report = check_admission(load_kernel(kernel), torch.device("cuda:0"), soft=True)
    assert (report.admitted, report.cases, report.cached) == (True, 24, True)
