"""How long and how much a connection may take. Fixed numbers; tests pass smaller ones to `create_app`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of the door that no setting changes.

    Attributes:
      header_timeout_s: from the first byte (or the connection) to the end of the headers.
      body_timeout_s: for the whole body, plus one second for every `min_body_rate_bytes` that came.
      min_body_rate_bytes: a slower client than this many bytes per second is given up.
      write_timeout_s: how long a client may leave a reply unread in full buffers.
      linger_s: how long the rest of a body is still taken (and dropped) after an early answer.
      keep_alive_s: how long an idle connection stays open; longer than the 60 s of common load balancers,
        so that they never send into a connection that is just being closed.
      max_header_bytes: of one request, names and values together.
      max_headers: of one request.
      max_open_requests: requests inside the server; one more gets 429 before its body is read.
      max_held_bytes: decoded bodies inside the server, all together; beyond it 429.
      max_chars_per_token: text averages 3 to 5 characters per token, and only a prompt made almost wholly of
        spaces could exceed this and still fit. A text above `max_model_len` times this is refused by its
        length, so that megabytes are not tokenised only to be refused.
      max_prompts: items or questions of one request, before any of them is looked at; the engine's
        `max_items` is usually lower.
      max_prompt_chars: of all prompts of one request, a shared text counted once per prompt, because that
        is what gets tokenised.
      retry_after_s: what a 503 tells the client.
      log_interval_s: between two log lines about the engine's traffic.
    """

    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    min_body_rate_bytes: int = 64 * 1024
    write_timeout_s: float = 30.0
    linger_s: float = 2.0
    keep_alive_s: int = 75
    max_header_bytes: int = 64 * 1024
    max_headers: int = 128
    max_open_requests: int = 4096
    max_held_bytes: int = 1 << 30
    max_chars_per_token: int = 16
    max_prompts: int = 65_536
    max_prompt_chars: int = 64 * 2**20
    retry_after_s: float = 5.0
    log_interval_s: float = 10.0
