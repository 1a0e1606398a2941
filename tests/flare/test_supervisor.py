"""A run is a series of jobs: which follows which, who is waited for, when it is given up."""

from types import SimpleNamespace

import pytest

import fedsolve as fs
from fedsolve.flare import supervisor
from fedsolve.flare.admin import SILENT, Admin, NoServer
from fedsolve.flare.supervisor import (
    MOST_EMPTY_JOBS,
    REJOIN,
    SILENCE_TIMEOUT,
    START_TIMEOUT,
    TOGETHER,
    NotReady,
    supervise,
)
from tests.support.deployment import experiment

DONE = {"done": True}


class Scripted(Admin):
    """A server whose jobs have the given news and end; `here(site, now)` says who is connected.

    A job of which only None is left answers no more, and never ends. `NoServer` stands for a server
    that does not answer once.
    """

    def __init__(self, monkeypatch, *jobs, sites="ab", here=lambda site, now: True, first=None):
        self.now, self.jobs, self.names, self.here = 0.0, jobs, sites, here
        self.first, self.started, self.rooms, self.told, self.down = first, [], [], [], set()
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(supervisor, "time", clock)

    def sleep(self, seconds):
        self.now += seconds + 0.01

    def running(self, run):
        return self.first

    def sites(self):
        return {site: self.now for site in self.names if self.here(site, self.now)}

    def submit(self, job):
        self.started.append(self.now)
        return str(len(self.started) - 1)

    def script(self, job):
        return [entry for entry in self.jobs[int(job)] if entry is not NoServer]

    def is_over(self, job):
        return None not in self.script(job) and self.told_of(job) >= len(self.script(job))

    def told_of(self, job):
        return max((since for each, since, _ in self.rooms if each == job), default=0)

    def news(self, job, since, make_room=False, cancel=False, revoke=""):
        if NoServer in self.jobs[int(job)] and job not in self.down:
            self.down.add(job)
            raise NoServer("The server does not answer.")
        if make_room and not any(room for _, _, room in self.rooms):
            self.asked_for_room = self.now
        self.rooms.append((job, since, make_room))
        script = self.script(job)
        rounds = sum("round" in entry for entry in script[: since + 1] if entry is not None)
        if since < len(script) and script[since] is None:
            return None
        return {"news": script[since : since + 1], "rounds": rounds}

    def play(self, sites=1, **settings):
        changed = experiment(1)
        changed.deploy.update(settings)
        return supervise(self, changed, "trial", self.told.append, sites)


def notes(admin):
    return [entry["note"] for entry in admin.told if "note" in entry]


def test_a_run_goes_on_with_a_new_job_until_it_is_done(monkeypatch):
    rounds = [{"round": 1}, {"round": 2}, {"round": 3}]
    admin = Scripted(monkeypatch, rounds[:2], [rounds[2], DONE])
    assert admin.play() == "1"
    assert [e for e in admin.told if "note" not in e] == [*rounds, DONE]  # each of them once
    start = "starting a job with 2 sites"
    assert notes(admin) == [start, "continuing with a new job", start]
    assert admin.told_of("1") == 2  # the job that is done knows that its end was heard


def test_a_job_that_runs_already_is_followed(monkeypatch):
    admin = Scripted(monkeypatch, [{"round": 1}, DONE], first="0")
    assert (admin.play(), admin.started) == ("0", [])


def test_an_error_ends_the_run(monkeypatch):
    admin = Scripted(monkeypatch, [{"round": 1}, {"error": "It cannot be."}, DONE])
    with pytest.raises(fs.InvalidInput, match="It cannot be"):
        admin.play()


def test_jobs_without_a_round_are_not_repeated_for_ever(monkeypatch):
    empty, useful = [{"note": "no site is ready"}], [{"round": 1}]
    admin = Scripted(monkeypatch, *[empty] * 9)
    why = f"{MOST_EMPTY_JOBS} jobs in a row ended without a round: no site is ready"
    with pytest.raises(NotReady, match=why):
        admin.play()
    assert len(admin.started) == MOST_EMPTY_JOBS
    admin = Scripted(monkeypatch, empty, empty, useful, *[empty] * 9)
    with pytest.raises(NotReady):
        admin.play()
    assert len(admin.started) == 3 + 1 + MOST_EMPTY_JOBS


def test_enough_sites_are_waited_for(monkeypatch):
    admin = Scripted(
        monkeypatch, [{"round": 1}, DONE], sites="abc", here=lambda site, now: now > ord(site) - 90
    )
    admin.play(sites=3)
    assert notes(admin)[:4] == [
        *(f"waiting for sites: {count} of 3 are connected" for count in range(3)),
        "starting a job with 3 sites",
    ]
    assert 9 < admin.started[0] < 11


def test_after_the_beginning_the_quorum_says_how_many(monkeypatch):
    """One of two is enough without a quorum, and not with one of 0.6."""

    def here(site, now):
        return site == "a" or not 1 < now < 50

    jobs = [{"round": n} for n in range(8)], [DONE]
    admin = Scripted(monkeypatch, *jobs, here=here)
    admin.play(sites=2)
    assert admin.started[1] < 20
    admin = Scripted(monkeypatch, *jobs, here=here)
    monkeypatch.setattr(
        admin, "submit", lambda job: (admin.sleep(2), Scripted.submit(admin, job))[1]
    )
    admin.play(sites=2, quorum=0.6)
    assert admin.started[1] > 50


def test_a_job_makes_room_for_a_site_that_is_back(monkeypatch):
    """When it sends heartbeats long after it was lost, and the job is not quite new."""
    back = 100.0
    rounds = [{"round": n} for n in range(3000)]
    news = [{"round": 0}, {"lost": "b"}, *rounds]
    admin = Scripted(monkeypatch, news, here=lambda site, now: site == "a" or now < 2 or now > back)
    admin.jobs = (news, [DONE])
    monkeypatch.setattr(Scripted, "is_over", lambda self, job: hasattr(self, "asked_for_room"))
    admin.play()
    assert back < admin.asked_for_room < back + 2
    assert back > REJOIN + SILENT


def test_a_job_that_is_new_makes_no_room(monkeypatch):
    news = [{"lost": "b"}, *[{"round": n} for n in range(9000)], DONE]
    admin = Scripted(monkeypatch, news)
    admin.play()
    assert REJOIN < admin.asked_for_room < REJOIN + 2


def test_a_round_that_needs_a_site_waits_for_it_and_for_those_that_come_with_it(monkeypatch):
    def here(site, now):
        return site == "a" or now < 1 or now > (100 if site == "b" else 100 + TOGETHER / 2)

    missed = [{"lost": "b"}, {"lost": "c"}, {"note": "too few", "missed": ["b", "c"]}]
    admin = Scripted(monkeypatch, missed, [{"round": 1}, DONE], sites="abc", here=here)
    admin.play()
    assert "waiting for one of b, c" in notes(admin)
    assert notes(admin)[-1] == "starting a job with 3 sites"
    assert 100 + 1.5 * TOGETHER - 1 < admin.started[1] < 100 + 1.5 * TOGETHER + 2


@pytest.mark.parametrize(
    ("news", "timeout"), [([None], START_TIMEOUT), ([{"round": 1}, None], SILENCE_TIMEOUT)]
)
def test_a_job_that_does_not_answer_is_over(monkeypatch, news, timeout):
    """A server that was started again reports its old jobs as running for ever."""
    admin = Scripted(monkeypatch, news, [DONE])
    assert admin.play() == "1"
    assert timeout < admin.started[1] < timeout + 2


def test_a_server_that_is_away_for_a_while_is_waited_for(monkeypatch):
    admin = Scripted(monkeypatch, [NoServer, {"round": 1}, DONE])
    assert admin.play() == "0"
    assert "The server does not answer. Waiting for it." in notes(admin)
