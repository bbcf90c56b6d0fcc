import sys
from pathlib import Path

import pytest
import small_repository

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def repository(tmp_path):
    return small_repository.start(tmp_path / "repository")
