"""`python -m jprefill`: the same as the `jprefill` command."""

import sys

from jprefill.cli import main

if __name__ == "__main__":
    sys.exit(main())
