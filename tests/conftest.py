import gc
import itertools
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")

import tests.support.environment  # noqa: E402, F401  (before JAX starts)
from tests.support.commands import fedsolve  # noqa: E402, F401  (a fixture)

tests_done = itertools.count(1)


def pytest_runtest_teardown(nextitem):
    """A process may map 65,530 pieces of memory, and every compiled program takes a few: the
    thousands that all tests compile together do not fit (XLA then dies of a segmentation fault)."""
    maps = Path("/proc/self/maps")  # it takes a while to read
    if next(tests_done) % 10 or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > 20_000:
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
