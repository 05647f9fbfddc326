"""Settings of every test run."""

import logging

# torch writes its compiler's trace to any handler it finds, and pytest's is always there: minutes of string building.
logging.getLogger("torch.__trace").disabled = True
