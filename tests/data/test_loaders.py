"""Loaders by name in a site's file, and rows that are held out by a key."""

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

import fedsolve as fs
from fedsolve.data.table_files import Source, held_out
from fedsolve.data.tables import Schema, load_table
from fedsolve.flare.site_config import check_data, load_clients, site_problem
from tests.support import hospitals

SCHEMA = Schema.of(hospitals.FEATURES, hospitals.LABEL, hospitals.GROUP)


def site(folder, text):
    (folder / "site.toml").write_text("[data]\n" + text)
    return folder / "site.toml"


def linear(params, data):
    return ((data["x"] @ params - data["y"]) ** 2).mean()


def test_npz_and_safetensors_have_a_client_axis(tmp_path):
    arrays = {"x": np.ones((3, 4, 2)), "y": np.zeros((3, 4))}
    np.savez(tmp_path / "a.npz", **arrays)
    save_file(arrays, tmp_path / "a.safetensors")
    for kind in ("npz", "safetensors"):
        found = load_clients(site(tmp_path, f'loader = "{kind}"\npath = "a.{kind}"'))
        assert found.keys() == arrays.keys()
        np.testing.assert_array_equal(found["x"], arrays["x"])


def test_parquet_and_arrow_are_samples_of_a_client_each(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    clients = [
        {"x": rng.standard_normal((n, 2)), "y": rng.integers(0, 5, n).astype(float)} for n in (3, 5)
    ]
    tables = [pa.table({"x": c["x"].tolist(), "y": c["y"]}) for c in clients]
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{number}.parquet")
        place = tmp_path / f"hf-{number}"  # as Hugging Face's save_to_disk writes it
        place.mkdir()
        with (
            pa.OSFile(str(place / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
        (place / "state.json").write_text("{}")
    problem = fs.Problem(linear, clients, np.zeros(2))
    for kind, names in {
        "parquet": ["0.parquet", "1.parquet"],
        "arrow": ["hf-0", "hf-1"],
    }.items():
        own = site_problem(problem, site(tmp_path, f'loader = "{kind}"\npath = {names}'))
        one, other = (fs.solve(p, fs.FedAvg(0.1), rounds=3).params for p in (problem, own))
        np.testing.assert_array_equal(one, other)


def test_arrays_of_columns_that_cannot_be_arrays_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for column, sentence in (
        (["a", "b"], "it has .*string, and arrays take numbers"),
        ([1.0, None], "1 missing values"),
        ([[1.0], [1.0, 2.0]], "its lists differ in size"),
    ):
        pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
        with pytest.raises(fs.InvalidInput, match=sentence):
            load_clients(site(tmp_path, 'loader = "parquet"\npath = "a.parquet"'), problem_of_two())
    (tmp_path / "empty").mkdir()
    with pytest.raises(fs.InvalidInput, match=r"no \.parquet or \.arrow files"):
        load_clients(site(tmp_path, 'loader = "arrow"\npath = "empty"'), problem_of_two())


def problem_of_two():
    return fs.Problem(linear, {"x": np.ones((1, 2, 2)), "y": np.ones((1, 2))}, np.zeros(2))


def test_a_parquet_table_is_read_by_the_schema_as_its_csv_is(tmp_path):
    pytest.importorskip("pyarrow")
    import pandas as pd

    hospitals.write(tmp_path, sizes=(30,))
    table = pd.read_csv(tmp_path / "hospital-0.csv", keep_default_na=False, dtype=str)
    for name in ("age", "pressure"):
        table[name] = pd.to_numeric(table[name])
    table.to_parquet(tmp_path / "typed.parquet")
    one = load_table(SCHEMA, tmp_path / "hospital-0.csv")
    other = load_table(SCHEMA, tmp_path / "typed.parquet")
    for name, column in one.items():
        np.testing.assert_array_equal(column, other[name])


def test_an_image_folder_has_a_folder_for_each_class(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in {"cat": 2, "dog": 1}.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (4, 6, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number}.png")
    text = 'loader = "images"\npath = "pictures"\n'
    found = load_clients(site(tmp_path, text))
    assert found["x"].shape == (1, 3, 4, 6, 3)
    assert found["y"].tolist() == [[0, 0, 1]]
    np.testing.assert_allclose(found["x"][0, 2], pixels / np.float32(255))
    found = load_clients(site(tmp_path, text + 'classes = ["bird", "cat", "dog"]\nsize = [2, 2]'))
    assert found["x"].shape == (1, 3, 2, 2, 3)
    assert found["y"].tolist() == [[1, 1, 2]]
    for extra, sentence in {
        'classes = ["cat"]': "has the folders cat, dog; classes: cat",
        "sice = 3": "has no key 'sice'",
        "size = 3": "size takes",
    }.items():
        with pytest.raises(fs.InvalidInput, match=sentence):
            load_clients(site(tmp_path, text + extra))
    (tmp_path / "pictures/cat/2.png").write_text("no")
    with pytest.raises(fs.InvalidInput, match=r"cat/2\.png is not an image"):
        load_clients(site(tmp_path, text))


def padded(path):
    return fs.stack_clients(
        [{"x": np.ones((2, 2)), "y": np.ones(2)}, {"x": np.ones((1, 2)), "y": np.ones(1)}]
    )


def as_samples(path):
    return fs.stack_clients([(np.ones((2, 2)), np.ones(2)), (np.ones((1, 2)), np.ones(1))])


def test_an_owners_loader_may_return_stacked_clients(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "own_loaders", sys.modules[__name__])
    path = site(tmp_path, 'loader = "own_loaders:padded"\npath = "x"')
    own = site_problem(problem_of_two(), path)
    assert np.asarray(own.samples.mask).tolist() == [[True, True], [True, False]]
    found = load_clients(site(tmp_path, 'loader = "own_loaders:as_samples"\npath = "x"'))
    assert np.asarray(found.mask).sum() == 3


def test_a_row_stays_where_its_key_put_it(tmp_path):
    """Whatever other rows there are, and with all rows of one key together."""
    header = ["patient", "x"]
    rows = [[str(n // 2), str(n)] for n in range(2000)]
    source = Source(test=0.2, key=("patient",))
    here = held_out(tmp_path, header, rows, source)
    assert 0.16 < here.mean() < 0.24  # 3 deviations of 1000 patients are 0.04
    np.testing.assert_array_equal(here[::2], here[1::2])
    np.testing.assert_array_equal(held_out(tmp_path, header, rows[700:900], source), here[700:900])
    more = held_out(tmp_path, header, rows, Source(test=0.4, key=("patient",)))
    assert (more >= here).all()
    alone = held_out(tmp_path, header, rows, Source(test=0.2))
    assert not np.array_equal(alone[::2], alone[1::2])  # without a key, whole rows decide
    with pytest.raises(fs.InvalidInput, match="has no column 'nobody', which is"):
        held_out(tmp_path, header, rows, Source(test=0.2, key=("nobody",)))


def test_rows_that_are_held_out_train_nothing(tmp_path):
    hospitals.write(tmp_path, sizes=(60, 40))
    problem = hospitals.problem(tmp_path, test=0.3)
    everything = hospitals.problem(tmp_path)
    kept = int(np.asarray(problem.samples.mask).sum())
    held = len(problem.test["y"])
    assert kept + held == int(np.asarray(everything.samples.mask).sum()) == 100
    assert 10 < held < 50
    run = fs.solve(problem, fs.FedAvg(0.5), rounds=40)
    assert run.history["test_accuracy"][-1] > 0.5
    data = problem.test
    scores = data["x"] @ np.asarray(run.params.weight)[0] + float(run.params.bias[0])
    loss = np.log1p(np.exp(np.where(data["y"] == 1, -scores, scores))).mean()
    assert run.history["test_loss"][-1] == pytest.approx(loss, rel=1e-4)
    text = 'loader = "csv"\npath = "hospital-0.csv"\ntest = 0.3'
    own = site_problem(problem, site(tmp_path, text))
    n = int(np.asarray(problem.samples.mask[0]).sum())
    np.testing.assert_array_equal(
        np.asarray(own.samples.values["x"])[0, :n], np.asarray(problem.samples.values["x"])[0, :n]
    )
    for wrong in ("1.0", "-0.1", '"a"'):
        with pytest.raises(fs.InvalidInput, match="test is a part of the rows"):
            check_data(site(tmp_path, f'loader = "csv"\npath = "a.csv"\ntest = {wrong}'))
