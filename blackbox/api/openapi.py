"""How `/openapi.json` describes requests and answers; `make docs` writes `docs/http.md` from it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Path, Query

from blackbox.admin.pending import LAST_MS
from blackbox.api.answers import Failure, NewDueTime, NotTaken

FAILURES: dict[int | str, dict[str, Any]] = {
    400: {"model": Failure, "description": "the request is not valid HTTP"},
    401: {"model": Failure, "description": "the bearer token is missing or invalid"},
    403: {
        "model": Failure,
        "description": "the token allows only reads; or no token is set, and the request comes from another host or site",
    },
    408: {"model": Failure, "description": "the body did not arrive within 60 s"},
    413: {"model": Failure, "description": "the body is too large, or has too many lines"},
    422: {"model": NotTaken, "description": "the request is invalid; nothing was written"},
    503: {
        "model": Failure,
        "description": "Kafka or Redis does not answer, or too many requests are in progress; try again",
    },
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {
        "model": Failure,
        "description": "no request has this id, and none with this caller id is pending",
    }
}
UNDETERMINED: dict[int | str, dict[str, Any]] = {
    504: {
        "model": Failure,
        "description": "the request's current place was not found in time; nothing was changed",
    }
}

ASKED = {
    "type": "object",
    "required": ["topic", "message"],
    "anyOf": [{"required": [name]} for name in ("countdown", "at", "every", "cron")],
    "additionalProperties": False,
    "properties": {
        "topic": {
            "type": "string", "pattern": "^[A-Za-z0-9._-]{1,249}$",
            "description": "the target of the message",
        },
        "message": {"description": "the message: a string, or any other JSON; null: a tombstone"},
        "countdown": {"type": "number", "description": "seconds until the message is due"},
        "at": {
            "type": ["string", "integer"],
            "description": "when the message is due, instead of countdown: RFC 3339, or epoch ms",
        },
        "id": {
            "type": "string", "minLength": 1, "maxLength": 255,
            "description": "the caller's id, to replace or cancel the request",
        },
        "key": {"type": "string", "description": "key of the delivered record"},
        "headers": {
            "type": "object", "additionalProperties": {"type": "string"},
            "description": "more headers of the delivered record",
        },
        "expires_after": {
            "type": "number", "minimum": 0,
            "description": "seconds after the due time; then the message becomes a dead letter",
        },
        "every": {
            "type": ["number", "string"],
            "description": "repeat so often: seconds, or an ISO 8601 duration",
        },
        "cron": {"type": "string", "description": "repeat at these times: five fields of cron"},
        "timezone": {"type": "string", "description": "IANA time zone of cron; default: UTC"},
        "encoding": {"const": "base64", "description": "the message is base64"},
        "key_encoding": {"const": "base64", "description": "the key is base64"},
    },
    "example": {"topic": "orders", "message": {"order": 17}, "countdown": 90},
}  # fmt: skip


def body_schema(
    schema: dict[str, Any], description: str, media_type: str = "application/json"
) -> dict[str, Any]:
    """The OpenAPI description of a body, for a route that reads its body itself."""
    content = {media_type: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content, "description": description}}


ONE_REQUEST = body_schema(ASKED, "a request in the format countdown")
MANY_REQUESTS = body_schema(
    {"type": "string"}, "requests as for POST /requests, one per line; at most 10,000 lines", "application/x-ndjson"
)  # fmt: skip
NEW_DUE_TIME = body_schema(NewDueTime.model_json_schema(), "the new due time: exactly one field")

From = Annotated[
    int | None, Query(ge=0, le=LAST_MS, description="due at this time or later, epoch ms")
]
To = Annotated[
    int | None, Query(ge=0, le=LAST_MS, description="due at this time or earlier, epoch ms")
]
Target = Annotated[str | None, Query(max_length=255, description="only requests to this topic")]
OfCaller = Annotated[str | None, Query(max_length=255, description="only requests by this caller")]
After = Annotated[str | None, Query(max_length=400, description="`next` of the previous page")]
Limit = Annotated[int, Query(ge=1, le=1000, description="the maximum number of requests")]
Id = Annotated[
    str,
    Path(
        description="an id that blackbox gave, a place such as TB/3@1234, or the caller's id of a pending request"
    ),
]
CallerName = Annotated[
    str | None,
    Header(
        alias="CALLER_SERVICE",
        convert_underscores=False,
        description="the caller: 1 to 255 printable characters, UTF-8",
    ),
]
ProxiedCallerName = Annotated[
    str | None,
    Header(
        alias="Caller-Service",
        description="the same, for proxies that drop CALLER_SERVICE; if both are given, they must be equal",
    ),
]
