"""``python integration_tests/soak``."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# Both fill over thousands of steps, and would look like something that grows: torch's record of the last
# 2,000 collectives, and the arenas that the C library gives to threads.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
os.environ.setdefault("MALLOC_ARENA_MAX", "1")

if __name__ == "__main__":
    from soak.command import main

    sys.exit(main())
