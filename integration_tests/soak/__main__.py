"""``python integration_tests/soak``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

if __name__ == "__main__":
    from soak.command import main

    sys.exit(main())
