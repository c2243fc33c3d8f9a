"""`python -m fmengine`, which is `fmengine`; local workers are started so."""

import sys

from fmengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
