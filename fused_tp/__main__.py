"""Run the `fused-tp` command as `python -m fused_tp`."""

import sys

from fused_tp.cli.main import main

sys.exit(main())
