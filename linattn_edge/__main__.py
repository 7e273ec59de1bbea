"""`python -m linattn_edge` is the command `linattn-edge`."""

import sys

from linattn_edge.cli import main

sys.exit(main())
