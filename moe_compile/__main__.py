"""`python -m moe_compile` is `moe-compile`."""

import sys

from moe_compile.cli.main import main

sys.exit(main())
