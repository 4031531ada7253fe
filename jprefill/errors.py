"""Every error that jprefill raises on purpose.

JPrefillError                       status  code
├── InvalidRequestError             400     invalid_value      the caller's input; `param` names the field
│   ├── ContextLengthError          400     context_length_exceeded
│   ├── LabelError                  400     invalid_label      a label is not one distinct token
│   └── UnsupportedFeatureError     400     unsupported_feature  known to the field, not served here
├── AuthenticationError             401     invalid_api_key
├── ModelNotFoundError              404     model_not_found
├── DeadlineExceededError           408     deadline_exceeded
├── PayloadTooLargeError            413     payload_too_large
├── UnsupportedMediaTypeError       415     unsupported_media_type
├── QueueFullError                  429     queue_full         `retry_after_s` says when to come back
├── EngineError                     500     engine_error       our bug, or the device's
├── NotReadyError                   503     not_ready          starting or draining: go elsewhere
├── RequestCancelledError           499     cancelled          the caller left; never sent
├── ConfigError                     -       -                  a setting: key, value, what is allowed
└── CheckpointError                 -       -                  a weight or tokenizer file: file, tensor, reason
    └── UnsupportedModelError       -       -                  a config feature that is not implemented
"""

from typing import ClassVar


class JPrefillError(Exception):
    """Root of the tree. `message` is safe to send to a client: no paths, addresses or prompt text."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "engine_error"
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(JPrefillError):
    """The caller's input is wrong; `param` names the field in the caller's own words."""

    status, code, type = 400, "invalid_value", "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """A prompt is longer than the model or the memory plan allows; the message holds both numbers."""

    code = "context_length_exceeded"


class LabelError(InvalidRequestError):
    """A label is not one distinct token in its context; the message says what it became and what works."""

    code = "invalid_label"


class UnsupportedFeatureError(InvalidRequestError):
    """A field or value that other products know and jprefill does not serve."""

    code = "unsupported_feature"


class AuthenticationError(JPrefillError):
    """The API key is missing or wrong."""

    status, code, type = 401, "invalid_api_key", "authentication_error"


class ModelNotFoundError(JPrefillError):
    """The model (or route) named by the caller is not served here."""

    status, code, type = 404, "model_not_found", "invalid_request_error"


class DeadlineExceededError(JPrefillError):
    """The request's deadline passed before its batch ran."""

    status, code, type = 408, "deadline_exceeded", "timeout_error"


class PayloadTooLargeError(JPrefillError):
    """The decoded body is larger than `max_body_bytes`."""

    status, code, type = 413, "payload_too_large", "invalid_request_error"


class UnsupportedMediaTypeError(JPrefillError):
    """Content type or content encoding is not served."""

    status, code, type = 415, "unsupported_media_type", "invalid_request_error"


class RequestCancelledError(JPrefillError):
    """The caller left before its batch ran. Logged as 499, never sent."""

    status, code, type = 499, "cancelled", "cancelled"


class QueueFullError(JPrefillError):
    """Back-pressure: nothing was queued; come back after `retry_after_s` seconds."""

    status, code, type = 429, "queue_full", "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(JPrefillError):
    """Our bug, or the device's. The request that met it gets this answer; the engine goes on."""


class NotReadyError(JPrefillError):
    """The engine is starting or draining; another replica may answer."""

    status, code, type = 503, "not_ready", "server_error"


class ConfigError(JPrefillError):
    """A setting is unknown, malformed or impossible; the message names key, value and what is allowed."""


class CheckpointError(JPrefillError):
    """A weight or tokenizer file cannot be used; the message names the file and the tensor."""


class UnsupportedModelError(CheckpointError):
    """The model's config asks for a feature that is not implemented; never ignored."""
