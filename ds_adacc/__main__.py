"""`python -m ds_adacc` is the command `ds_adacc`."""

import sys

from ds_adacc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
