"""Graph-related error codes of the driver.

CANN defines the numbers in ``acl/error_codes/rt_error_codes.h``. torch_npu reports them in the text
of a RuntimeError.
"""

from __future__ import annotations

import re

NO_RESOURCE = frozenset({207005, 207007, 207008, 207009, 207010, 207012})
"""Codes for an exhausted resource: memory, events, streams, notifies, models, or a limit."""

OTHER_KERNELS = frozenset({107033, 107034, 107040, 207019})
"""Codes after which an update is assumed to need other kernels. The task group was interrupted or
is in the wrong state, or the update failed or is not supported."""

UNJOINED = 107025
"""Code for a captured stream that was not joined to the stream on which the capture began."""

HOST_READS = frozenset({107027, 107030})
"""Codes for calls that are forbidden in a capture, such as a wait for a captured stream."""

STICKY = frozenset(
    {
        *range(507010, 507020),  # heartbeat lost, model or kernel failed, timed out or trapped
        *range(507034, 507037),  # vector core timed out, failed, trapped
        *range(507042, 507046),  # reads and writes out of bounds
        *range(507048, 507051),  # fused tasks timed out, failed, trapped
        *range(507053, 507058),  # device memory and link errors
    }
)
"""Codes of errors after which every later call of the process fails."""

# If a launch fails, torch_npu ends its launch thread, reports this text once, and silently drops
# all later launches.
_QUEUE_ENDED = "The process exits for this inner error"

_CODE = re.compile(r"error code(?: is|:)\s*(\d+)")


def error_code(error: BaseException) -> int | None:
    """Return the driver's error code in the text of ``error``, or None."""
    text = str(error)
    if "Alloc sq cq fail" in text:
        return 207005
    match = _CODE.search(text)
    return int(match.group(1)) if match else None


def means(error: BaseException, codes: frozenset[int]) -> bool:
    """Whether the text of ``error`` or of an exception in its chain contains one of ``codes``."""
    current: BaseException | None = error
    while current is not None:
        if error_code(current) in codes:
            return True
        current = current.__cause__ or current.__context__
    return False


def lost_reason(error: BaseException) -> str | None:
    """Return the reason why this process lost the device, or None if ``error`` is recoverable."""
    text = str(error)
    if _QUEUE_ENDED in text:
        return f"torch_npu's launch thread ended: {text.splitlines()[0]}"
    if error_code(error) in STICKY:
        return " ".join(text.split("\n")[0].split())
    return None
