import os
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
# Workers, and the processes that tests start, need not compile what another one has compiled.
programs = Path(__file__).parent.parent / ".pytest_cache" / "programs"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
sys.path.insert(0, str(Path(__file__).parent))  # oracles and examples are modules of their own
