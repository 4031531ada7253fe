"""The HTTP server. It only parses, queues and awaits; `run.serve` starts it."""
