"""Settings of JAX and Matplotlib; import this before them."""

import os
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
# Workers, and the processes that tests start, need not compile what another one has compiled.
programs = Path(__file__).parents[2] / ".pytest_cache" / "programs"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
# Most of the tests' time is compiling, and most of that serves programs that run for longer: with
# these settings it takes less than half. As users compile: JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
# Data from the folder beside the checkout, and never from the cache of whoever runs the tests.
data = Path(__file__).parents[3] / "shared" / "data"
if data.is_dir():
    os.environ.setdefault("FEDSOLVE_DATA", str(data))
os.environ["XDG_CACHE_HOME"] = str(programs.with_name("cache"))
