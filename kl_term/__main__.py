"""``python -m kl_term`` is ``kl-term``."""

from __future__ import annotations

import sys

from kl_term.cli.main import main

sys.exit(main())
