import ctypes
import gc
import os
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")

import tests.support.environment  # noqa: E402, F401  (before JAX starts)
from tests.support.commands import fedsolve  # noqa: E402, F401  (a fixture)

most = 3 * 2**30  # bytes of memory with which compiled programs are thrown away


def pytest_runtest_teardown(nextitem):
    """Throw compiled programs away before they fill the memory.

    The thousands that all tests compile together take many gigabytes. They also take more pieces of
    memory than the 65,530 that a process may map, and XLA then dies of a segmentation fault.
    """
    global most
    if memory() > most:
        import jax  # not before the environment above is set

        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":  # glibc keeps what was freed
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        most = max(most, memory() + 2**30)


def memory():
    """Return the bytes of memory in use; 0 where the system does not say."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if told.exists() else 0


@pytest.fixture
def optimised():
    """Programs compiled as users have them: two that compute the same then agree to the bit."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
