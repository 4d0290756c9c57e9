from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Timer(_message.Message):
    __slots__ = ("header", "action", "correlation_id", "payload", "exchange", "expire_at")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_AT_FIELD_NUMBER: _ClassVar[int]
    header: Header
    action: int
    correlation_id: str
    payload: bytes
    exchange: str
    expire_at: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., action: _Optional[int] = ..., correlation_id: _Optional[str] = ..., payload: _Optional[bytes] = ..., exchange: _Optional[str] = ..., expire_at: _Optional[int] = ...) -> None: ...

class TimerExpired(_message.Message):
    __slots__ = ("header", "correlation_id", "universe")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    UNIVERSE_FIELD_NUMBER: _ClassVar[int]
    header: Header
    correlation_id: str
    universe: str
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., correlation_id: _Optional[str] = ..., universe: _Optional[str] = ...) -> None: ...
