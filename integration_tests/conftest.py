"""Settings of all integration tests."""

import os

# torch looks up the names of a store's peers. A name server that loses a question would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
