"""``python -m analysis`` is ``analysis``."""

from __future__ import annotations

import sys

from analysis.cli.main import main

sys.exit(main())
