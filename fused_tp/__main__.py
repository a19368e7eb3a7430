"""`python -m fused_tp` is `fused-tp`."""

import sys

from fused_tp.cli.main import main

sys.exit(main())
