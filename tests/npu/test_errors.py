"""What the driver's error codes mean."""

from __future__ import annotations

import pytest

from devgraph.npu.errors import NO_RESOURCE, OTHER_KERNELS, error_code, lost_reason, means


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NPU function error: aclrtMemcpy, error code is 107030", 107030),
        ("ACL stream synchronize failed, error code:507046", 507046),
        ("Alloc sq cq fail, ret=1", 207005),
        ("something else", None),
    ],
)
def test_code_is_read_from_the_text_of_an_error(text: str, code: int | None):
    assert error_code(RuntimeError(text)) == code


def test_meaning_is_found_in_what_an_error_was_raised_from():
    try:
        try:
            raise RuntimeError("error code is 207008")
        except RuntimeError as inner:
            raise ValueError("the capture failed") from inner
    except ValueError as outer:
        assert means(outer, NO_RESOURCE)
        assert not means(outer, OTHER_KERNELS)


def test_sticky_codes_mean_a_lost_device_and_others_do_not():
    assert lost_reason(RuntimeError("synchronize, error code is 507015")) is not None
    assert lost_reason(RuntimeError("capture, error code is 107030")) is None
    assert "launch thread ended" in str(
        lost_reason(RuntimeError("The process exits for this inner error, operator Mul"))
    )
