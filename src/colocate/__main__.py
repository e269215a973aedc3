"""`python -m colocate`: the command line, for launchers that start a module."""

import sys

from colocate.cli import main

sys.exit(main())
