"""The peaks behind `speed/mfu` and the memories behind plans are those of the data sheets."""

import pytest

from openelm_jax.parallel.devices import memory_bytes, peak_flops

GIB = 2**30


@pytest.mark.parametrize(
    ("device_kind", "teraflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),  # v5e
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 2307 / 2),  # a device is one of the two cores of a chip
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
    ],
)
def test_a_known_device_has_its_data_sheet_peak(device_kind, teraflops):
    assert peak_flops(device_kind) == teraflops * 1e12


@pytest.mark.parametrize(
    ("device_kind", "teraflops"),
    [
        ("TPU v4", 275 / 6),  # six passes in bfloat16
        ("TPU v5 lite", 197 / 6),
        ("TPU7x", 2307 / 2 / 6),
        ("NVIDIA A100-SXM4-80GB", 19.5),  # not the 156 of TF32
        ("NVIDIA H100 80GB HBM3", 67),
        ("NVIDIA H100 PCIe", 51),
        ("NVIDIA H200", 67),
        ("NVIDIA B200", 75),
        ("NVIDIA GB200", 80),
        ("NVIDIA L4", 30.3),
    ],
)
def test_a_float32_product_has_the_peak_of_its_precision(device_kind, teraflops):
    assert peak_flops(device_kind, "float32") == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("device_kind", "gibibytes"),
    [
        ("TPU v4", 32),
        ("TPU v5 lite", 16),
        ("TPU v5", 95),
        ("TPU v6 lite", 32),
        ("TPU7x", 192 / 2),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H200", 141),
        ("NVIDIA B200", 180),
    ],
)
def test_a_known_device_has_the_memory_it_is_sold_with(device_kind, gibibytes):
    """GPUs show the driver up to two percent less."""
    assert 0.98 * gibibytes * GIB < memory_bytes(device_kind) <= gibibytes * GIB


def test_what_is_not_known_of_a_device_is_not_guessed():
    assert peak_flops("cpu") is None
    assert peak_flops("cpu", "float32") is None
    assert memory_bytes("cpu") is None
