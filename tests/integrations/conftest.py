"""One tiny model for all that TRL trains here."""

from __future__ import annotations

import pytest

from tests.integrations import tiny_trl


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return tiny_trl.save_model(tmp_path_factory.mktemp("model"), seed=3)
