"""One-sided confidence bounds on rates and means, from counts and sums.

Rates: Clopper and Pearson, "The Use of Confidence or Fiducial Limits" (Biometrika 26, 1934). Means:
Maurer and Pontil, "Empirical Bernstein Bounds and Sample Variance Penalization" (COLT 2009),
Theorem 11, for independent values in a known range.

Both hold for any number of samples, and need samples to be independent, not identically
distributed: the bound is then on the mean of the samples' expectations. For Clopper-Pearson that is
Hoeffding's theorem of 1956: a sum of independent decisions has lighter tails than a binomial one of
the same mean.
"""

from __future__ import annotations

import math

from scipy.stats import beta

from fedsolve.errors import InvalidInput

Real = float | int


def clopper_pearson_upper(successes: Real, count: Real, failure: Real) -> float:
    """Bound a rate from above: P(rate > bound) ≤ `failure`.

    Args:
        successes: The number of successes k.
        count: The number of samples n.
        failure: δ, the probability with which the bound may fail.

    Returns:
        The largest rate p with P(Binomial(n, p) ≤ k) ≥ δ; 1 without samples.

    Raises:
        InvalidInput: If `failure` is not in (0, 1), or there are more successes than samples.

    Example:
        >>> import fedsolve as fs
        >>> round(fs.auditing.clopper_pearson_upper(0, 59, 0.05), 3)  # the "rule of three"
        0.05
    """
    _check(successes, count, failure)
    if successes >= count:
        return 1.0
    return float(beta.ppf(1 - failure, successes + 1, count - successes))


def clopper_pearson_lower(successes: Real, count: Real, failure: Real) -> float:
    """Bound a rate from below: P(rate < bound) ≤ `failure`.

    Args:
        successes: The number of successes k.
        count: The number of samples n.
        failure: δ, the probability with which the bound may fail.

    Returns:
        The smallest rate p with P(Binomial(n, p) ≥ k) ≥ δ; 0 without samples.

    Raises:
        InvalidInput: If `failure` is not in (0, 1), or there are more successes than samples.

    Example:
        >>> import fedsolve as fs
        >>> round(fs.auditing.clopper_pearson_lower(59, 59, 0.05), 3)
        0.95
    """
    _check(successes, count, failure)
    if successes <= 0:
        return 0.0
    return float(beta.ppf(failure, successes, count - successes + 1))


def empirical_bernstein(
    count: Real, total: Real, squares: Real, width: Real, failure: Real
) -> float:
    """Bound how far a sample mean is from its expectation, in one direction.

    P(E mean > mean + bound) ≤ `failure`, and the same below, for
    bound = √(2 V ln(2/δ)/n) + 7 R ln(2/δ)/(3(n − 1)), with the sample variance V and the range R.

    Args:
        count: The number of values n.
        total: Their sum.
        squares: The sum of their squares.
        width: R, the width of a range in which every value lies for certain.
        failure: δ, the probability with which the bound may fail.

    Returns:
        The bound; infinite for fewer than two values.

    Raises:
        InvalidInput: If `failure` is not in (0, 1), or the width is negative.

    Example:
        >>> import fedsolve as fs
        >>> round(fs.auditing.empirical_bernstein(1000, 100.0, 100.0, 1.0, 0.05), 4)
        0.0344
    """
    _check(0, count, failure)
    if not width >= 0:
        raise InvalidInput(f"The width of a range is at least 0, got {width}.")
    if count < 2:
        return math.inf
    variance = max(squares - total**2 / count, 0.0) / (count - 1)
    logarithm = math.log(2 / failure)
    return math.sqrt(2 * variance * logarithm / count) + 7 * width * logarithm / (3 * (count - 1))


def _check(successes: Real, count: Real, failure: Real) -> None:
    if not 0 < failure < 1:
        raise InvalidInput(f"failure is a probability between 0 and 1, got {failure}.")
    if not 0 <= successes <= count:
        raise InvalidInput(f"There are {successes} successes among {count} samples.")
