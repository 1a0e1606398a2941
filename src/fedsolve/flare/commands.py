"""What `fedsolve deploy` does, word by word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve import cli
from fedsolve.config import Experiment
from fedsolve.flare import deploy, engine
from fedsolve.folder import new_folder, save


def local(experiment: Experiment, sites: int, out_dir: str | None) -> None:
    """A federation on this machine, and the same folder as `fedsolve run`."""
    folder = new_folder(out_dir, f"{experiment.name}-deployed")
    with cli.Progress(f"{experiment.name}, {sites} sites", experiment.options["rounds"]) as bar:
        run = deploy.deploy_local(experiment, sites, lambda news: _show(bar, news, sites))
    save(folder, {"": [run]}, experiment.resolved, "finished")
    cli.out.print(cli.closing_table({"": [run]}))
    cli.out.print(f"Written to {folder}/", markup=False, soft_wrap=True)


def _show(bar: cli.Progress, news: dict[str, Any], sites: int) -> None:
    if "note" in news:
        bar.say(None, str(news["note"]))
        return
    facts = [f"f {news['objective']:.4g}"]
    facts += [f"g {news['constraint']:.4g}"] if "constraint" in news else []
    facts += [f"{len(news['answered'])}/{sites} answered"]
    facts += [cli.size_text(news["bytes_up_total"] + news["bytes_down_total"])]
    facts += [f"{news['milliseconds']:.0f} ms an exchange"]
    bar.say(news["round"], "  ".join(facts))


def init(file: str, out_dir: str | None) -> None:
    """Kits, to be carried to their machines by a way that is trusted."""
    for name, kit in deploy.init(Path(file), Path(out_dir or "kits")).items():
        cli.out.print(f"{name}: {kit}", markup=False, soft_wrap=True)


def server(kit: str) -> None:
    """The server, in the foreground."""
    process = engine.start_server(_kit(kit, "fed_server.json"))
    _foreground(process, Path(kit), "the server runs; Ctrl-C ends it")


def site(kit: str, data: str) -> None:
    """A site, in the foreground, once the server would take it."""
    from fedsolve.flare.data import data_table

    data_table(Path(data))
    place = _kit(kit, "fed_client.json")
    deploy.check_welcome(place)
    process = engine.start_site(place, Path(data))
    _foreground(process, place, f"{place.name} runs; Ctrl-C ends it")


def _foreground(process: Any, kit: Path, text: str) -> None:
    cli.out.print(text)
    status = deploy.keep_running(
        process, kit / "output.log", lambda line: cli.out.print(line, markup=False)
    )
    if status:
        cli.fail(f"The process ended with status {status}; its log is {kit / 'output.log'}.", 1)


def submit(experiment: Experiment, kit: str) -> None:
    """Gives the server a run to do."""
    admin, run = engine.Admin(_kit(kit, "fed_admin.json"), timeout=10), deploy.new_run()
    with engine.temporary_folder() as folder:
        job = admin.submit(engine.write_job(folder, experiment.resolved, run, 30.0))
    cli.out.print(f"{run} is job {job}; results in the server's kit, fedsolve/runs/{run}")
    admin.close()


def ask_admin(what: str, kit: str) -> None:
    """Who is there and what runs; or the end of it all."""
    admin = engine.Admin(_kit(kit, "fed_admin.json"), timeout=10)
    if what == "stop":
        admin.shut_down()
        cli.out.print("The server and all sites were told to stop.")
    else:
        for line in admin.overview():
            cli.out.print(line, markup=False)
    admin.close()


def _kit(kit: str, needs: str) -> Path:
    if not Path(kit, "startup", needs).is_file():
        raise cli.InvalidInput(f"{kit} is not the kit that this needs: it has no startup/{needs}.")
    return Path(kit).resolve()
