"""`python -m herta_gpu` is `herta`."""

import sys

from herta_gpu.app.cli import (
    main,  # light: what takes time is imported where Ctrl-C has its sentence
)

if __name__ == "__main__":
    sys.exit(main())
