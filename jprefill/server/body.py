"""Reads a request body: bounded in bytes and time, decoded, and parsed into a typed struct."""

import asyncio
import io
import re
import zlib
from collections.abc import Callable

import msgspec
import zstandard
from starlette.types import Receive, Scope

from jprefill.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PayloadTooLargeError,
    RequestCancelledError,
    UnsupportedMediaTypeError,
)
from jprefill.server.limits import Limits
from jprefill.server.record import header

_MAX_ZSTD_WINDOW_BYTES = 8 * 2**20  # RFC 9659: more is not allowed in HTTP
Decompress = Callable[[bytes, int], bytes]
_PATH = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?:missing required|unknown) field `(.*?)`", re.DOTALL)


async def read_body(scope: Scope, receive: Receive, max_bytes: int, limits: Limits) -> bytes:
    """Reads the body as it was sent, at most `max_bytes`, refusing as soon as it is known to be longer.

    Raises:
      UnsupportedMediaTypeError: content type or encoding is not served.
      PayloadTooLargeError: by its declared length, or by the bytes that came.
      DeadlineExceededError: the client is slower than `limits` allows.
      RequestCancelledError: the client left.
    """
    _check_content_type(header(scope, b"content-type"))
    decompressor(header(scope, b"content-encoding"))
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    started_s = asyncio.get_running_loop().time()
    while True:
        until_s = started_s + limits.body_timeout_s + len(body) / limits.min_body_rate_bytes
        try:
            async with asyncio.timeout_at(until_s):
                message = await receive()
        except TimeoutError:
            raise DeadlineExceededError("the request body came too slowly") from None
        if message["type"] == "http.disconnect":
            raise RequestCancelledError("the client left while sending its body")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def decode_body(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """Undoes the content encoding; the limit counts decoded bytes, so a small bomb stays small."""
    decompress = decompressor(encoding)
    if decompress is None:
        return body
    try:
        decoded = decompress(body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise InvalidRequestError(f"the body is not valid {encoding} data") from error
    if len(decoded) > max_bytes:
        raise _too_large(max_bytes)
    return decoded


def parse[T](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Parses a JSON body; every fault is one 400 whose `param` names the field.

    Raises:
      InvalidRequestError: empty, malformed, too deep, or not what the struct says.
    """
    if not body.strip():
        raise InvalidRequestError("the body is empty: send a JSON object")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        raise InvalidRequestError(_PATH.sub("", message), param=param_of(message)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error


def param_of(message: str) -> str | None:
    """The field that a msgspec message is about: `questions[0].type` for ``at `$.questions[0].type` ``."""
    path, field = _PATH.search(message), _FIELD.search(message)
    parts = [path.group(1).lstrip(".") if path else "", field.group(1) if field else ""]
    return ".".join(part for part in parts if part) or None


def decompressor(encoding: str | None) -> Decompress | None:
    """What undoes a `Content-Encoding`; None for plain bodies.

    Raises:
      UnsupportedMediaTypeError: unknown, or several in a row.
    """
    name = (encoding or "identity").strip().lower()
    if name == "identity":
        return None
    if name not in _DECOMPRESSORS:
        raise UnsupportedMediaTypeError("this content encoding is not served: use gzip, deflate, zstd or none")
    return _DECOMPRESSORS[name]


def _check_content_type(content_type: str | None) -> None:
    """JSON, or nothing said: `curl -d` users who send a form type learn why they are refused."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaTypeError("send the body as content-type application/json")


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {max_bytes} bytes after decoding")


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    return _unzip(body, max_bytes, zlib.MAX_WBITS | 16)


def _inflate(body: bytes, max_bytes: int) -> bytes:
    """`deflate` means zlib data; some clients send it without the zlib header."""
    try:
        return _unzip(body, max_bytes, zlib.MAX_WBITS)
    except zlib.error:
        return _unzip(body, max_bytes, -zlib.MAX_WBITS)


def _unzip(body: bytes, max_bytes: int, window_bits: int) -> bytes:
    stream = zlib.decompressobj(window_bits)
    decoded = stream.decompress(body, max_bytes)
    if len(decoded) < max_bytes and not stream.eof:
        raise EOFError("truncated")
    return decoded


def _unzstd(body: bytes, max_bytes: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
    return decompressor.stream_reader(io.BytesIO(body)).read(max_bytes)


_DECOMPRESSORS: dict[str, Decompress] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "zstd": _unzstd,
}
