"""Serves a fake model from a process of its own: `python child.py '{"port": 0, ...}'`. No test by itself.

Keys: those of `ServerConfig`; `limits` (of `Limits`); `delay_s`, `full` (of the engine); `load_s`, `broken`.
"""

import json
import sys
import time

from fakes import ByteTokenizer, FakeEngine

from jprefill.config import ServerConfig
from jprefill.errors import CheckpointError, QueueFullError
from jprefill.scorer import Scorer
from jprefill.server.limits import Limits
from jprefill.server.logs import set_up_logs
from jprefill.server.run import serve_scorer
from jprefill.tokenization.chat import ChatTemplate


class OftenFullEngine(FakeEngine):
    """Refuses the first `full` requests."""

    full = 0

    def submit(self, request):
        if self.full > 0:
            self.full -= 1
            raise QueueFullError("the queue is full", retry_after_s=0.2)
        return super().submit(request)


def main(options: dict) -> int:
    limits = Limits(**options.pop("limits", {}))
    load_s, is_broken = options.pop("load_s", 0.0), options.pop("broken", False)
    engine = OftenFullEngine(delay_s=options.pop("delay_s", 0.0))
    engine.full = options.pop("full", 0)

    def load() -> Scorer:
        time.sleep(load_s)
        if is_broken:
            raise CheckpointError("model.safetensors: the tensor lm_head.weight is not there")
        tokenizer = ByteTokenizer()
        return Scorer(engine, tokenizer, ChatTemplate(tokenizer.chat_template, {"bos_token": "<s>"}))

    config = ServerConfig(**options)
    set_up_logs(config.log_format, config.log_level)
    return serve_scorer(load, config, limits)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
