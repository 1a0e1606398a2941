"""Figures of runs for papers."""

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.plots import participation, plot
from tests.support import examples


@pytest.fixture(scope="module")
def swept():
    algorithm = fs.FedSGM(
        0.05, 0.1, fs.Soft(5.0), participants=3, uplink=fs.TopK(0.4), downlink=fs.TopK(0.4)
    )
    return fs.sweep(examples.least_squares(), algorithm, 12, seeds=[0, 1], step_size=[0.05, 0.02])


def test_any_entry_of_the_history_is_a_panel(swept, tmp_path):
    panels = ["objective", "switch", "compression_error", "uplink_error", "cohort"]
    figure = swept.plot(tmp_path / "all.pdf", panels=panels, width=7.0)
    assert figure.get_figwidth() == pytest.approx(7.0)
    assert (tmp_path / "all.pdf").read_bytes()[:5] == b"%PDF-"
    *curves, heat = figure.axes
    for name, axis in zip(panels, curves, strict=False):
        runs = [run for run in swept.runs if run.settings["step_size"] == 0.02]
        expected = np.mean([run.history[name] for run in runs], axis=0)
        np.testing.assert_allclose(axis.lines[1].get_ydata(), expected, rtol=1e-6)
    (mesh,) = heat.collections
    assert mesh.get_array().shape == (6, 12)  # clients, rounds
    first = next(run for run in swept.runs if run.settings["step_size"] == 0.02)
    shown = [np.flatnonzero(column) for column in mesh.get_array().T]
    np.testing.assert_array_equal(shown, np.sort(first.history["cohort"], axis=1))
    with pytest.raises(fs.InvalidInput, match=r"Runs have no 'speed' to show; they have .*switch"):
        first.plot(panels=["speed"])
    with pytest.raises(fs.InvalidInput, match="width must be"):
        first.plot(width=-1.0)


def test_rounds_over_the_tolerance_are_marked(swept):
    figure = swept.plot(panels=["constraint"])
    marks = [line for line in figure.axes[0].lines if line.get_gid() == "over"]
    for step_size, line in zip((0.05, 0.02), marks, strict=True):
        runs = [run for run in swept.runs if run.settings["step_size"] == step_size]
        mean = np.mean([run.history["constraint"] for run in runs], axis=0)
        expected = runs[0].history["round"][mean > 0.1]
        assert len(expected) > 0
        np.testing.assert_array_equal(line.get_xdata(), expected)


def test_fonts_are_as_one_says(swept, tmp_path):
    figure = swept[0].plot(tmp_path / "x.pdf", style={"font.family": "serif", "font.size": 7})
    assert figure.axes[0].title.get_fontfamily() == ["serif"]
    assert b"DejaVuSerif" in (tmp_path / "x.pdf").read_bytes()
    with pytest.raises(fs.InvalidInput, match=r"'font' is no setting of matplotlib's"):
        swept[0].plot(style={"font": "serif"})


def test_a_long_legend_fits_into_the_picture(swept, tmp_path):
    figure = plot({f"algorithm {k}": swept.runs[:1] for k in range(15)}, tmp_path / "long.png")
    (legend,) = figure.legends
    assert legend.get_window_extent().y0 >= 0


def test_shares_of_rounds_are_by_bins():
    cohorts = np.array([[0, 2], [2, -1], [1, 2]] * 300)
    ends, shares = participation(cohorts, np.arange(10, 9001, 10))
    assert ends[-1] == 9000
    assert len(ends) == 180
    np.testing.assert_allclose(shares.mean(axis=0), [1 / 3, 1 / 3, 1])
