"""`python -m stateset_agents VERB`, for launchers that start a module: torchrun, accelerate."""

import sys

from stateset_agents.cli.main import main

sys.exit(main())
