"""The status of a request of which a look-up found too little within its limit."""

from __future__ import annotations

from dataclasses import replace

from blackbox.core.journal_search import ReadLimit
from blackbox.core.request_status import RequestStatus


def limit_exceeded(known: RequestStatus, limit: ReadLimit, *, is_over: bool) -> RequestStatus:
    what = "how it ended" if is_over else "whether it is pending"
    detail = (
        f"{what} was not found: a look-up reads a limited part of the journals, here {limit}; "
        "`blackbox audit --parquet` covers every request"
    )
    if not is_over:
        detail += (
            "; while it is pending, GET /requests lists it at its due time; the `source` listed "
            "there, such as TB/3@1234, can be looked up and cancelled"
        )
    return replace(known, state="over" if is_over else "undetermined", detail=detail)
