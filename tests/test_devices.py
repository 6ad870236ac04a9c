"""The peaks behind `speed/mfu` are those of the data sheets."""

import pytest

from openelm_jax.parallel.devices import peak_flops


@pytest.mark.parametrize(
    ("device_kind", "teraflops"),
    [
        ("TPU v5 lite", 197),  # v5e
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
    ],
)
def test_a_known_device_has_its_data_sheet_peak(device_kind, teraflops):
    assert peak_flops(device_kind) == teraflops * 1e12


def test_the_peak_of_an_unknown_device_is_not_guessed():
    assert peak_flops("cpu") is None
