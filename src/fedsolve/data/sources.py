"""Where each data set is published, and which functions of `readers` turn it into arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from fedsolve.data import readers
from fedsolve.data.readers import Arrays, Dataset


@dataclasses.dataclass(frozen=True)
class File:
    """An original file where its owner publishes it.

    Args:
        url: The file's address.
        md5: The published checksum, or None if none is published: of the unpacked contents if the
            address ends in `.gz`, of the file itself otherwise (also for an archive).

    Example:
        >>> import fedsolve as fs
        >>> fs.datasets.File("https://example.org/data.npz", md5=None).md5 is None
        True
    """

    url: str
    md5: str | None

    @property
    def name(self) -> str:
        """The name of the file on this machine, without `.gz` unless it is an archive."""
        name = self.url.rsplit("/", 1)[1]
        return name.removesuffix(".gz") if self.is_packed else name

    @property
    def is_packed(self) -> bool:
        """Whether the file is a single one that is packed."""
        return self.url.endswith(".gz") and not self.url.endswith(".tar.gz")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a data set comes from and how it becomes arrays.

    Args:
        files: The original files.
        parse: Function from the paths of those files to the arrays of the cached npz file.
        present: Function from the arrays of the npz file to the `Dataset` that `load` returns.
        contents: SHA-256 of the parsed arrays, for data without a published checksum.

    Example:
        >>> from fedsolve.data.sources import SOURCES
        >>> len(SOURCES["mnist"].files)
        4
    """

    files: tuple[File, ...]
    parse: Callable[..., Arrays]
    present: Callable[[Mapping[str, np.ndarray]], Dataset]
    contents: str | None = None


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FLAMBY = (  # the commit is part of the address
    "https://raw.githubusercontent.com/owkin/FLamby/edacf54d5211520583b0133d55ac39b6fda8324b/"
    "flamby/datasets/fed_tcga_brca/"
)
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
SOURCES: dict[str, Source] = {
    "mnist": Source(
        (
            File(_MNIST + "train-images-idx3-ubyte.gz", "6bbc9ace898e44ae57da46a324031adb"),
            File(_MNIST + "train-labels-idx1-ubyte.gz", "a25bea736e30d166cdddb491f175f624"),
            File(_MNIST + "t10k-images-idx3-ubyte.gz", "2646ac647ad5339dbf082846283269ea"),
            File(_MNIST + "t10k-labels-idx1-ubyte.gz", "27ae3e4e09519cfbb04c329615203637"),
        ),
        readers.read_mnist,
        readers.present_images,
    ),
    "cifar10": Source(
        (
            File(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",  # without pickles
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        readers.read_cifar10,
        readers.present_images,
    ),
    "adult": Source(
        (
            File(_UCI + "adult/adult.data", "5d7c39d7b8804f071cdd1f2a7c460872"),
            File(_UCI + "adult/adult.test", "35238206dfdf7f1fe215bbb874adecdc"),
        ),
        readers.read_adult,
        readers.present_adult,
    ),
    "qsar_oral_toxicity": Source(
        (File(_UCI + "00508/qsar_oral_toxicity.zip", None),),
        readers.read_qsar,
        readers.present_qsar,
        contents="5d174d7a057da444ff23b14339ede98e447b3d347e1511e879942e39bf2f5d84",
    ),
    "tcga_brca": Source(
        (
            File(_FLAMBY + "brca.csv", "989df4ddec084f749d9593146d7ba92f"),
            File(
                _FLAMBY + "dataset_creation_scripts/train_test_split.csv",
                "e648057e47463ee7763924d779cd7f2d",
            ),
            File(_FLAMBY + "centers.csv", "03f23a40c35dfb8460b910d090e98dd5"),
        ),
        readers.read_tcga_brca,
        readers.present_tcga_brca,
    ),
    "food101": Source(
        (
            File(
                "http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                "85eeb15f3717b99a5da872d97d918f87",
            ),
        ),
        readers.read_food101,
        readers.present_images,
    ),
}
