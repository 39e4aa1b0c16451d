"""Turns `python -m k3tvm` into the command line."""

import sys

from k3tvm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
