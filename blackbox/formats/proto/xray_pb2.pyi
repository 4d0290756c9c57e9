from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Request(_message.Message):
    __slots__ = ("context", "correlation_id", "type")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    context: _containers.RepeatedCompositeFieldContainer[Request.ContextEntry]
    correlation_id: str
    type: str
    def __init__(self, context: _Optional[_Iterable[_Union[Request.ContextEntry, _Mapping]]] = ..., correlation_id: _Optional[str] = ..., type: _Optional[str] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("request", "type")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    request: Request
    type: str
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., type: _Optional[str] = ...) -> None: ...

class TimerCreate(_message.Message):
    __slots__ = ("request", "expire_at")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_AT_FIELD_NUMBER: _ClassVar[int]
    request: Request
    expire_at: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., expire_at: _Optional[int] = ...) -> None: ...

class TimerCancel(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: Request
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class TimerExpired(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: Response
    def __init__(self, response: _Optional[_Union[Response, _Mapping]] = ...) -> None: ...
