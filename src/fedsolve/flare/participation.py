"""Which sites took part in a run: in how many rounds, which ones were missing, when and why.

The server keeps the record in its journal as plain tables, one for each expected site, and everyone
who shows it (the closing table, `run.json`, `status`, the report) reads these.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping

from fedsolve.types import Table

MOST_GAPS = 100  # gaps of a site that are told apart; the record is written after every round
NOT_YET = "it was not part of the run yet"


class Participation:
    """The record of a run's expected sites.

    A site is missing from a round if it refuses, does not answer or is not connected, whether or
    not one of its clients would have been asked. `sites` has by name: `clients`; `asked`,
    `answered`, `refused` and `absent`, numbers of rounds; `evaluated`, whether it answered the
    newest evaluation; `why` if it did not; `missed`, ranges of rounds with a reason and the time at
    which they began; and `alarms`, what was suspicious in its answers, and in which rounds.
    """

    def __init__(self):
        self.rounds = 0  # of the run so far
        self.sites: dict[str, Table] = {}

    def expect(self, sites: Iterable[str]) -> None:
        """Add sites to those that are expected."""
        for site in sites:
            if site not in self.sites:
                counts = dict.fromkeys(("clients", "asked", "answered", "refused", "absent"), 0)
                self.sites[site] = {**counts, "evaluated": True, "why": "", "missed": []}
                if self.rounds:
                    self._miss(self.sites[site], 1, self.rounds, NOT_YET)

    def end_round(
        self,
        round: int,
        asked: set[str],
        answered: set[str],
        silent: set[str],
        why: Mapping[str, str],
    ) -> None:
        """Record a round that is complete; `why` says what is wrong with the sites that miss it."""
        self.rounds = round + 1
        for site, record in self.sites.items():
            record["asked"] += site in asked
            if site in why:
                record["absent" if site in silent else "refused"] += 1
                self._miss(record, self.rounds, self.rounds, why[site])
            elif site in answered:
                record["answered"] += 1

    def end_evaluation(self, heard: Iterable[str], why: Mapping[str, str]) -> None:
        """Record which sites told the values of their clients."""
        heard = set(heard)
        for site, record in self.sites.items():
            record["evaluated"] = site in heard
            record["why"] = "" if site in heard else why.get(site, "it was not asked")

    def alarm(self, site: str, round: int, why: str, refused: bool, clipped: bool = False) -> bool:
        """Record something suspicious in a site's answers; return whether it is new."""
        alarms = self.sites.get(site, {}).setdefault("alarms", [])
        for alarm in alarms:
            if alarm["why"] == why:
                alarm["rounds"] += alarm["to"] != round
                alarm["to"] = round
                return False
        if len(alarms) < MOST_GAPS:
            facts: Table = {"from": round, "to": round, "rounds": 1, "refused": refused}
            facts |= {"clipped": True} if clipped else {}
            alarms.append({**facts, "why": why, "at": now()})
        return True

    def _miss(self, record: Table, first: int, last: int, why: str) -> None:
        gaps = record["missed"]
        if gaps and gaps[-1]["to"] == first - 1 and gaps[-1]["why"] == why:
            gaps[-1]["to"] = last
        elif len(gaps) < MOST_GAPS:
            gaps.append({"from": first, "to": last, "why": why, "at": now()})
        else:
            gaps[-1]["to"] = last

    def saved(self) -> Table:
        """Return the record as a table."""
        return {"rounds": self.rounds, "sites": self.sites}

    def restore(self, table: Table) -> None:
        """Continue a record."""
        self.rounds, self.sites = table["rounds"], table["sites"]


def now() -> str:
    """Return the time, UTC, as a text."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clients_expected(sites: Mapping[str, Table]) -> int | None:
    """Return the number of clients of all expected sites; None if some site never told it."""
    counts = [record["clients"] for record in sites.values()]
    return sum(counts) if all(counts) else None


def missing(sites: Mapping[str, Table]) -> dict[str, str]:
    """Return the sites that did not take part to the end of a run, with when and why."""
    return {
        site: _sentence(record)
        for site, record in sorted(sites.items())
        if not record["evaluated"] or (record["missed"] and not record["answered"])
    }


def summary(sites: Mapping[str, Table]) -> Table:
    """Return a run's entry in `run.json`: `clients` is None if some site never told how many."""
    alarms = {site: alarm_texts(record) for site, record in sorted(sites.items())}
    return {
        "clients": clients_expected(sites),
        "missing": missing(sites),
        "alarms": {site: texts for site, texts in alarms.items() if texts},
        "sites": dict(sites),
    }


def gaps(sites: Mapping[str, Table]) -> list[str]:
    """Return lines for sites that missed rounds or the last evaluation, or with alarms."""
    absent = missing(sites)
    lines = []
    for site, record in sorted(sites.items()):
        lines += [f"Alarm: {site}: {text}" for text in alarm_texts(record)]
        if site in absent:
            lines.append(f"Without {site}: {absent[site]}")
        elif record["missed"]:
            missed = record["refused"] + record["absent"]
            lines.append(f"{site} was back at the end; it missed {_gaps(record, missed)}")
    return lines


def alarm_texts(record: Table) -> list[str]:
    """Return what was suspicious in a site's answers, with the rounds."""
    texts = []
    for alarm in record.get("alarms", []):
        done = "clipped" if alarm.get("clipped") else "refused" if alarm["refused"] else "taken"
        rounds = f"{alarm['rounds']} round{'s' * (alarm['rounds'] > 1)}, {alarm['from']}"
        last = f" to {alarm['to']}" if alarm["to"] != alarm["from"] else ""
        texts.append(f"{alarm['why']} ({done}; {rounds}{last})")
    return texts


def _sentence(record: Table) -> str:
    counted = record["refused"] + record["absent"]
    evaluation = "" if record["evaluated"] else f"the last evaluation ({record['why']})"
    rounds = _gaps(record, counted) if record["missed"] else ""
    parts = [part for part in (rounds, evaluation) if part]
    return f"it missed {', and '.join(parts)}"


def _gaps(record: Table, counted: int) -> str:
    """Describe the rounds that a site missed: the last gap in full."""
    last = record["missed"][-1]
    whole = last["from"] == last["to"]
    rounds = f"round {last['from']}" if whole else f"rounds {last['from']} to {last['to']}"
    more = len(record["missed"]) - 1
    earlier = f" and {more} earlier gap{'s' if more > 1 else ''}" if more else ""
    return f"{rounds}{earlier}, since {last['at']}: {last['why']}" + (
        f" ({counted} rounds in all)" if more else ""
    )
