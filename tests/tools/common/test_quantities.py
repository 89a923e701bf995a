"""Sizes, rates and times as people type them."""

from __future__ import annotations

import pytest

from tools.common.quantities import BYTES, BYTES_A_SECOND, FLOPS, SECONDS, Quantity


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (BYTES, "80e9", 80e9),
        (BYTES, "80GB", 80e9),
        (BYTES, "80 gb", 80e9),  # memory is not measured in bits
        (BYTES, "80GiB", 80 * 2**30),
        (BYTES, "1.5TB", 1.5e12),
        (BYTES_A_SECOND, "25GB", 25e9),
        (BYTES_A_SECOND, "25 GB/s", 25e9),
        (BYTES_A_SECOND, "400Gbit", 50e9),
        (BYTES_A_SECOND, "200 Mbit/s", 25e6),
        (BYTES_A_SECOND, "25GIB/S", 25 * 2**30),
        (FLOPS, "312T", 312e12),
        (FLOPS, "312TFLOP/s", 312e12),
        (FLOPS, "989.4 tflops", 989.4e12),
        (SECONDS, "4us", 4e-6),
        (SECONDS, "4e-6", 4e-6),
    ],
)
def test_a_number_with_its_unit(quantity: Quantity, text: str, value: float) -> None:
    assert quantity.parse("--x", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("quantity", "text", "told"),
    [
        (BYTES, "80", "--x must be at least 1 MB. Got 80 = 80 bytes. Write the unit, such as 80GB."),
        (BYTES, "0", "--x must be at least 1 MB. Got 0 = 0 bytes."),
        (BYTES, "80 apples", "--x must be bytes: a number such as 80e9, or with a unit, such as 80GB or 80GiB."),
        (BYTES, "80Gbit", "--x must be bytes: "),
        (BYTES, "", "Got ''."),
        (BYTES, "nan", "Got 'nan'."),
        (BYTES, "1e999", "Got 1e999 = inf bytes."),
        (BYTES_A_SECOND, "25", "--x must be at least 1 MB/s. Got 25 = 25 bytes/s. Write the unit, such as 25GB."),
        (BYTES_A_SECOND, "-25GB", "Got -25GB = -2.5e+10 bytes/s. Write a number such as 25e9, or with a unit"),
        (BYTES_A_SECOND, "25Gb", "such as 25GB (bytes) or 200Gbit (bits). Got '25Gb'."),
        (BYTES_A_SECOND, "25gb/s", "Got '25gb/s'."),
        (BYTES_A_SECOND, "100G", "Got '100G'."),
        (FLOPS, "312", "Got 312 = 312 FLOP/s. Write the unit, such as 312T."),
        (SECONDS, "4", "--x must be above 0 and at most 1 s. Got 4 = 4 seconds. Write the unit, such as 4us."),
    ],
)
def test_what_was_not_meant(quantity: Quantity, text: str, told: str) -> None:
    with pytest.raises(ValueError) as problem:  # noqa: PT011 (its words are compared)
        quantity.parse("--x", text)
    assert told in str(problem.value)
