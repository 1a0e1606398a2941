import gc
import os
import sys
from pathlib import Path

import matplotlib
import pytest

matplotlib.use("Agg")
# Workers, and the processes that tests start, need not compile what another one has compiled.
programs = Path(__file__).parent.parent / ".pytest_cache" / "programs"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
# Most of the tests' time is compiling, and LLVM's part of it serves programs that run for longer.
# As users compile: JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # oracles and examples are modules of their own


def pytest_runtest_teardown(nextitem):
    """A process may map 65,530 pieces of memory, and every compiled program takes a few: the
    thousands that all tests compile together do not fit (XLA then dies of a segmentation fault)."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        import jax  # not before the environment above is set

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimised():
    """Programs compiled as users have them: two that compute the same then agree to the bit."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
