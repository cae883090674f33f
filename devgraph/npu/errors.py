"""What the driver's error codes mean for a graph.

The numbers are CANN's (``acl/error_codes/rt_error_codes.h``); torch_npu hands them over inside the
text of a RuntimeError.
"""

from __future__ import annotations

import re

NO_RESOURCE = frozenset({207005, 207007, 207008, 207009, 207010, 207012})
"""Resource allocation failed; no event, stream, notify or model left; over a limit."""

OTHER_KERNELS = frozenset({107033, 107034, 107040, 207019})
"""A task group in the wrong state or interrupted; an update that failed or is not supported."""

UNJOINED = 107025
"""The capture contains a stream that was not joined to the original one."""

STICKY = frozenset(
    {
        *range(507010, 507020),  # heartbeat lost, model or kernel failed, timed out or trapped
        *range(507034, 507037),  # vector core timed out, failed, trapped
        *range(507042, 507046),  # reads and writes out of bounds
        *range(507048, 507051),  # fused tasks timed out, failed, trapped
        *range(507053, 507058),  # device memory and link errors
    }
)
"""After these every later call of the process fails."""

# torch_npu ends the thread that launches operators after its first failure, says this once, and
# from then on drops every launch without a word.
_QUEUE_ENDED = "The process exits for this inner error"

_CODE = re.compile(r"error code(?: is|:)\s*(\d+)")


def error_code(error: BaseException) -> int | None:
    """Return the driver's code in ``error``'s text, or None."""
    text = str(error)
    if "Alloc sq cq fail" in text:
        return 207005
    found = _CODE.search(text)
    return int(found.group(1)) if found else None


def means(error: BaseException, codes: frozenset[int]) -> bool:
    """Whether ``error``, or what it was raised from or during, carries one of ``codes``."""
    known: BaseException | None = error
    while known is not None:
        if error_code(known) in codes:
            return True
        known = known.__cause__ or known.__context__
    return False


def lost_reason(error: BaseException) -> str | None:
    """Return why ``error`` means that this process can no longer use the device, or None."""
    text = str(error)
    if _QUEUE_ENDED in text:
        return f"torch_npu's launch thread ended: {text.splitlines()[0]}"
    if error_code(error) in STICKY:
        return " ".join(text.split("\n")[0].split())
    return None
