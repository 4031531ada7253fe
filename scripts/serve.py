"""Serves the demo model in the foreground and says what to paste into another terminal: `make serve`."""

import sys

from local_server import LocalServer, ServerError

EXAMPLE = """
Ready. In another terminal:

  curl {url}/v1/score -H 'Content-Type: application/json' -d '{{
    "query": "Great food, kind staff. Sentiment: positive\\nNever again. Sentiment: negative\\n",
    "items": ["The soup was cold and nobody apologised. Sentiment:", "We will be back! Sentiment:"],
    "labels": [" positive", " negative"], "apply_softmax": true}}'

All routes: {url}/docs      Ctrl-C stops the server.
"""


def main(port: int = 8000) -> int:
    """Runs until Ctrl-C or until the server leaves; returns the exit status."""
    try:
        with LocalServer(port, is_verbose=True) as server:
            print(EXAMPLE.format(url=server.url), flush=True)
            try:
                return server.wait()
            except KeyboardInterrupt:
                print("stopping", file=sys.stderr)
        return 0
    except ServerError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
