"""`python -m herta_gpu` is `herta`."""

import sys

from herta_gpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
