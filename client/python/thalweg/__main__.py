"""`python -m thalweg` is the `thalweg` command."""

import sys

from thalweg.cli import main

sys.exit(main())
