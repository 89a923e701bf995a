"""Peaks by the names that devices give themselves, and none for what is something else."""

from __future__ import annotations

import pytest
import torch

from tools.training.peak_flops import Compute, peak, peak_of


@pytest.mark.parametrize(
    ("name", "compute", "tera"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 130.0),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A6000", "fp32", 38.7),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H800 PCIe", "fp16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "tf32", 653.7),
    ],
)
def test_known_devices(name: str, compute: Compute, tera: float | None) -> None:
    assert peak_of(name, compute) == (None if tera is None else pytest.approx(tera * 1e12))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A40-48Q",
        "NVIDIA T400",
        "NVIDIA A1000",
        "Quadro P4000",
        "cpu",
    ],
)
def test_no_peak_is_made_up(name: str) -> None:
    assert peak_of(name, "bf16") is None
    assert peak_of(name, "fp16") is None


def test_a_processor_has_no_known_peak() -> None:
    assert peak(torch.device("cpu"), "bf16") is None


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16, fp16, tf32, fp32. Got 'fp8'"):
        peak_of("NVIDIA H100 PCIe", "fp8")  # type: ignore[arg-type]
