"""Alerts, objectives and dashboards: only declared metrics, current files, and each alert at its threshold."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.promtool import Expected, Promtool, Series

from parti.cli.main import main
from parti.core import slo
from parti.telemetry.alerts import Thresholds, alerts
from parti.telemetry.dashboards import Dashboard, dashboards
from parti.telemetry.grafana import dashboard_json, expressions
from parti.telemetry.instruments import Histogram
from parti.telemetry.objectives import recordings
from parti.telemetry.queries import BATCH, METRICS, buckets, series
from parti.telemetry.rules import alert_rules, all_alerts, objective_rules

DEPLOY = Path(__file__).parents[2] / "deploy"
NAMES = tuple(dict.fromkeys(alert.name for alert in all_alerts()))


def of(name: str, **labels: str) -> str:
    """A series of worker `a` in the fleet `f`."""
    matchers = [f'{key}="{value}"' for key, value in {"job": "f", "worker": "a", **labels}.items()]
    return f"parti_{name}{{{','.join(matchers)}}}"


class Example(NamedTuple):
    """An alert just above its threshold, and just below it; long enough for its `for`."""

    alert: str
    fires: Series
    silent: Series
    minute: int = 20
    severity: str = ""


COUNT, IN_TIME = of("handler_latency_seconds_count"), of("handler_latency_seconds_bucket", le="0.5")
MESSAGES, AGAIN = of("consumer_messages_total"), of("consumer_redeliveries_total")
UPDATES, FAILED = of("consumer_update_duration_seconds_count"), of("consumer_update_failures_total")
MOVES = {bound: of("move_seconds_bucket", le=bound) for bound in ("2.5", "5.0", "10.0", "+Inf")}
STABLE, WAITING = of("fleet_state", state="stable"), of("fleet_state", state="standby")
MOVED = of("claims_given_total", kind="moved")
STALLS = of("stalls_total", kind="loop")
LOST = of("lease_losses_total", cause="ended")
UNSTORED, UNRECORDED = of("progress_failures_total"), of("history_lost_total")
AUDIT = 'parti_audit_violations{stream="S",invariant="no_loss"}'
AUDITED = 'parti_audit_finished_timestamp_seconds{stream="S"}'
TABLE = 'parti_pipeline_lag{stream="S",table="bronze"}'


def calls(a_minute: int, in_time: int) -> Series:
    return {COUNT: f"0+{a_minute}x200", IN_TIME: f"0+{in_time}x200"}


def delivered(again: int) -> Series:
    return {MESSAGES: "0+100x200", AGAIN: f"0+{again}x200"}


def updates(a_minute: int, failed: str) -> Series:
    return {UPDATES: f"0+{a_minute}x200", FAILED: failed}


EXAMPLES = (
    Example("PartiRedeliveries", {MESSAGES: "0+100x60", AGAIN: "0+4x60"}, {MESSAGES: "0+100x60", AGAIN: "0+2x60"}),
    Example(
        "PartiSubjectsNearCap",
        {of("consumer_subject_count"): "455x60", of("consumer_subject_limit"): "500x60"},
        {of("consumer_subject_count"): "450x60", of("consumer_subject_limit"): "500x60"},
    ),
    Example(
        "PartiConsumerUpdatesFail",
        {UPDATES: "0+9x60", FAILED: "0+1x60"},
        {UPDATES: "0+100x60", FAILED: "0+1x60"},
    ),
    Example(
        "PartiBacklog",
        {of("consumer_inflight"): "380x60", of("consumer_inflight_limit"): "400x60"},
        {of("consumer_inflight"): "380x5 0x2 380x60", of("consumer_inflight_limit"): "400x80"},
        minute=14,
    ),
    Example("PartiLag", {of("consumer_lag"): "10001x60"}, {of("consumer_lag"): "10000x60"}),
    Example(
        "PartiNotPulling",
        {of("pull_healthy"): "0x60", of("consumer_subject_count"): "1x60"},
        {of("pull_healthy"): "0x60", of("consumer_subject_count"): "0x60"},  # a job worker
    ),
    Example(
        "PartiDisconnected",
        {of("connection_state", state="connected"): "0x60", of("connection_state", state="lost"): "1x60"},
        {of("connection_state", state="connected"): "1x60", of("connection_state", state="lost"): "0x60"},
    ),
    Example("PartiStalled", {of("stalled"): "1x60"}, {of("stalled"): "0x60", STALLS: "3x60"}),
    # A process that has left because of it tells nothing any more, but was counted.
    Example("PartiStalled", {of("stalled"): "0x60", STALLS: "0x5 1x60"}, {of("stalled"): "0x60"}, minute=10),
    Example("PartiDeadLetters", {of("dead_letters_total"): "0x5 1x60"}, {of("dead_letters_total"): "7x60"}, 10),
    Example("PartiJobsWait", {of("jobs_slot_queue"): "1x60"}, {of("jobs_slot_queue"): "1x10 0 1x60"}),
    Example("PartiDown", {'up{job="f"}': "1x60"}, {of("build_info", version="0"): "1x60"}),
    Example("PartiNoLeader", {of("leading"): "0x60", STABLE: "1x60"}, {of("leading"): "1x60", STABLE: "1x60"}),
    # Solo workers and job workers have no state; one that stands by does not lead.
    Example("PartiNoLeader", {of("leading"): "0x60", STABLE: "1x60"}, {of("leading"): "0x60", WAITING: "1x60"}),
    Example(
        "PartiPartitionsUnowned",
        {of("fleet_unowned_partitions"): "1x60"},
        {of("fleet_unowned_partitions"): "0x60"},
    ),
    Example(
        "PartiDegraded", {of("fleet_state", state="degraded"): "1x60"}, {of("fleet_state", state="degraded"): "0x60"}
    ),
    Example("PartiLeaseLost", {LOST: "0x5 1x60"}, {LOST: "3x60"}, minute=10),
    Example(
        "PartiClaimsFail", {of("claim_failures_total"): "0+1x60"}, {of("claim_failures_total"): "0x5 2x60"}, minute=12
    ),
    Example(
        "PartiMovesSlow",
        {MOVES["2.5"]: "0x60", MOVES["5.0"]: "0+8x60", MOVES["10.0"]: "0+10x60", MOVES["+Inf"]: "0+10x60"},
        {MOVES["2.5"]: "0x60", MOVES["5.0"]: "0+98x60", MOVES["10.0"]: "0+100x60", MOVES["+Inf"]: "0+100x60"},
    ),
    Example(
        "PartiPartitionsFlap",
        {MOVED: "0+1x60", of("fleet_partitions"): "8x60"},
        {MOVED: "0x5 8x60", of("fleet_partitions"): "8x60"},
        minute=32,
    ),
    Example(
        "PartiStandbyMissing",
        {of("standby", instance="one"): "1x60"},
        {of("standby", instance="one"): "1x60", of("standby", instance="two"): "1x60"},
    ),
    Example("PartiPositionsNotStored", {UNSTORED: "0+1x60"}, {UNSTORED: "5x60"}),
    Example("PartiLedgerStopped", {of("ledger_failures_total"): "0+1x60"}, {of("ledger_failures_total"): "5x60"}),
    Example(
        "PartiMirrorFull",
        {of("mirror_bytes"): "96x60", of("mirror_limit_bytes"): "100x60"},
        {of("mirror_bytes"): "0x60", of("mirror_limit_bytes"): "0x60"},  # there is none
    ),
    Example("PartiHistoryLost", {UNRECORDED: "0x5 1x60"}, {UNRECORDED: "9x60"}, minute=10),
    Example("PartiAuditViolated", {AUDIT: "1x60"}, {AUDIT: "0x60"}),
    # Promtool's clock begins at 0: minute 20 is 1,200 s.
    Example("PartiAuditOld", {AUDITED: "-172300x60"}, {AUDITED: "-171500x60"}),
    Example("PartiPipelineLags", {TABLE: "100001x60"}, {TABLE: "100000x60"}, minute=40),
    Example("PartiLatencyBudget", calls(100, 80), calls(100, 95), 90, "page"),
    Example("PartiLatencyBudget", calls(100, 95), calls(1000, 995), 180, "ticket"),
    Example("PartiRedeliveryBudget", delivered(50), delivered(10), 90, "page"),
    Example("PartiRedeliveryBudget", delivered(10), delivered(2), 180, "ticket"),
    Example("PartiUpdateBudget", updates(10, "0+1x200"), updates(10, "0x60 2x140"), 90, "page"),
    Example("PartiUpdateBudget", updates(100, "0x30 0+0.5x170"), updates(10, "0x60 2x140"), 180, "ticket"),
)


@pytest.fixture
def promtool(debian_tool: Callable[[str], str], tmp_path: Path) -> Promtool:
    return Promtool(debian_tool("promtool"), tmp_path)


# ── what is named exists ──────────────────────────────────────────────────────────────────────────────────────────


def declared() -> dict[str, set[str]]:
    """Labels of each series that there can be, by its name."""
    found: dict[str, set[str]] = {}
    for metric in (*METRICS.declared, *BATCH.declared):
        labels = {*metric.labels, "job", "instance"}
        if isinstance(metric, Histogram):
            found |= {f"{metric.name}_{part}": labels for part in ("count", "sum")}
            found[f"{metric.name}_bucket"] = {*labels, "le"}
        else:
            found[metric.name] = labels
    for recording in recordings(Thresholds()):
        found[recording.record] = {"job", "objective"}
    return found


def check_names(expression: str, known: dict[str, set[str]]) -> None:
    used = set()
    for name, matchers in re.findall(r"([\w:]*parti_[\w:]*)(?:\{([^}]*)\})?", expression):
        assert name in known, f"{name} is not declared: {expression}"
        labels = set(re.findall(r"(\w+)\s*(?:=|!)", matchers))
        assert labels <= known[name], f"{name} has no label {labels - known[name]}: {expression}"
        used |= known[name]
    for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        grouped = set(group.split(", "))
        assert grouped <= used, f"no series has {grouped - used}: {expression}"


def test_rules_and_panels_name_declared_metrics_and_labels_only() -> None:
    known = declared()
    found = [alert.expr for alert in all_alerts()] + [recording.expr for recording in recordings(Thresholds())]
    found += [expression for dashboard in dashboards().values() for expression in expressions(dashboard)]
    assert len(found) > 100
    for expression in found:
        check_names(expression, known)


@pytest.mark.parametrize(
    "expression",
    ["rate(parti_nothing_total[5m])", 'parti_fleet_state{mood="bad"}', "sum by (mood) (parti_fleet_state)"],
)
def test_that_check_finds_what_is_not_declared(expression: str) -> None:
    with pytest.raises(AssertionError):
        check_names(expression, declared())


def test_what_is_not_declared_cannot_be_selected() -> None:
    with pytest.raises(ValueError, match="parti_fleet_state has no label 'mood'"):
        series(METRICS.fleet_state, mood="bad")
    with pytest.raises(ValueError, match=r"has no state 'bad'; expected one of .*degraded"):
        series(METRICS.fleet_state, state="bad")
    with pytest.raises(ValueError, match="has no cause 'rain'; expected one of ended, reset"):
        series(METRICS.lease_losses, cause="rain")
    with pytest.raises(ValueError, match=r"has no bucket up to 0\.3"):
        buckets(METRICS.handler_latency, 0.3)
    with pytest.raises(ValueError, match="is a histogram"):
        series(METRICS.handler_latency)


# ── the files ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_deployed_files_are_current() -> None:
    wanted = {
        "prometheus/parti-alerts.yml": alert_rules(),
        "prometheus/parti-objectives.yml": objective_rules(),
        **{f"grafana/{name}": dashboard_json(each) for name, each in dashboards().items()},
    }
    for name, text in wanted.items():
        assert (DEPLOY / name).read_text(encoding="utf-8") == text, f"{name}: run .venv/bin/python docs/generate.py"


def test_promtool_takes_the_rules_and_every_expression_of_the_dashboards(promtool: Promtool) -> None:
    promtool.check(alert_rules())
    promtool.check(objective_rules())
    found = [expression for dashboard in dashboards().values() for expression in expressions(dashboard)]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(found)]
    promtool.check(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))


@pytest.mark.parametrize("dashboard", dashboards().values(), ids=lambda each: each.uid)
def test_panels_have_their_own_ids_and_places(dashboard: Dashboard) -> None:
    page: dict[str, Any] = json.loads(dashboard_json(dashboard))
    panels = page["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert {variable["name"] for variable in page["templating"]["list"]} == {"datasource", "fleet"}
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, f"{one} and {other} overlap"
    for panel in panels:
        assert 0 <= panel["gridPos"]["x"] <= 24 - panel["gridPos"]["w"]
        assert panel["title"]
        if panel["type"] != "row":
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
            assert all(
                target["expr"] and target["datasource"]["uid"] == "${datasource}" for target in panel["targets"]
            )
    titles = [panel["title"] for panel in panels if panel["type"] != "row"]
    assert len(set(titles)) >= len(titles) - 1  # "Partitions" is a number and a picture


def test_the_objectives_are_those_of_the_gold_tables() -> None:
    recorded = {recording.objective for recording in recordings(Thresholds())} - {""}
    assert recorded == {objective.name for objective in slo.OBJECTIVES}


def test_alerts_writes_files_with_other_thresholds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--latency-p95", "0.5", "--lag", "77", "--move", "3", "--runbooks", "https://wiki.example/parti/"]
    assert main(["alerts", str(tmp_path / "new"), *wanted]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "parti-alerts.yml",
        "parti-fleet.json",
        "parti-objectives.json",
        "parti-objectives.yml",
    ]
    rules = (tmp_path / "new" / "parti-alerts.yml").read_text()
    assert "(parti_consumer_lag) > 77" in rules
    assert 'runbook_url: "https://wiki.example/parti/PartiLag.md"' in rules
    assert 'le=\\"1.0\\"' in (tmp_path / "new" / "parti-objectives.yml").read_text()
    assert capsys.readouterr().out.startswith(f"Written to {tmp_path / 'new'}: parti-alerts.yml")


def test_alerts_refuses_a_limit_that_is_no_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", str(tmp_path / "new"), "--latency-p95", "0.3"]) == 2
    assert not (tmp_path / "new").exists()
    error = capsys.readouterr().err
    assert "--latency-p95 0.3 does not work" in error
    assert len(error.splitlines()) == 1


# ── each alert at its threshold ───────────────────────────────────────────────────────────────────────────────────


def test_every_alert_has_an_example() -> None:
    assert {(example.alert, example.severity) for example in EXAMPLES if example.severity} == {
        (alert.name, alert.severity) for alert in all_alerts() if alert.name.endswith("Budget")
    }
    assert {example.alert for example in EXAMPLES} == set(NAMES)


def together(examples: Iterable[Example]) -> tuple[dict[str, str], list[tuple[Example, str, bool]]]:
    """The series of many examples side by side, each in a fleet (or, without fleet, a stream) of its own."""
    merged: dict[str, str] = {}
    asked = []
    for number, example in enumerate(examples):
        for values, fires in ((example.fires, True), (example.silent, False)):
            own = f"{number}-{'fires' if fires else 'silent'}"
            label = "job" if any('job="f"' in name for name in values) else "stream"
            for name, numbers in values.items():
                merged[name.replace('job="f"', f'job="{own}"').replace('stream="S"', f'stream="{own}"')] = numbers
            asked.append((example, f'{label}="{own}"', fires))
    return merged, asked


def test_each_alert_fires_above_its_threshold_and_is_silent_below(promtool: Promtool) -> None:
    merged, asked = together(each for each in EXAMPLES if each.alert != "PartiDown")
    promtool.ask(merged, [Expected(e.alert, e.minute, fires, e.severity, where) for e, where, fires in asked])
    down = next(each for each in EXAMPLES if each.alert == "PartiDown")
    promtool.ask(down.fires, [Expected(down.alert, down.minute, fires=True)])
    promtool.ask(down.silent, [Expected(down.alert, down.minute, fires=False)])


def test_an_alert_that_must_last_does_not_fire_at_once(promtool: Promtool) -> None:
    lasting = {alert.name for alert in all_alerts() if alert.lasts != "0s"}
    merged, asked = together(each for each in EXAMPLES if each.alert in lasting and not each.severity)
    assert len(asked) > 10
    promtool.ask(merged, [Expected(example.alert, 0, fires=False, where=where) for example, where, _ in asked])


BEGAN = of("started_timestamp_seconds")
NEW = (
    Example("PartiDeadLetters", {of("dead_letters_total"): "_x5 3x60"}, {of("dead_letters_total"): "_x5 0x60"}, 8),
    Example("PartiStalled", {STALLS: "_x5 1x60"}, {STALLS: "_x5 0x60"}, 8),
    Example("PartiLeaseLost", {LOST: "_x5 1x60"}, {LOST: "_x5 0x60"}, 8),
    Example("PartiClaimsFail", {of("claim_failures_total"): "_x5 6x60"}, {of("claim_failures_total"): "_x5 5x60"}, 8),
    Example("PartiHistoryLost", {UNRECORDED: "_x5 1x60"}, {UNRECORDED: "_x5 0x60"}, 8),
    Example("PartiPositionsNotStored", {UNSTORED: "_x5 1x60"}, {UNSTORED: "_x5 0x60"}, 9),
    Example(
        "PartiLedgerStopped",
        {of("ledger_failures_total"): "_x5 1x60"},
        {of("ledger_failures_total"): "_x5 0x60"},
        9,
    ),
    Example(
        "PartiConsumerUpdatesFail",
        {UPDATES: "_x5 3x60", FAILED: "_x5 1x60"},
        {UPDATES: "_x5 3x60", FAILED: "_x5 0x60"},
        8,
    ),
    Example(
        "PartiPartitionsFlap",
        {MOVED: "_x5 25x60", of("fleet_partitions"): "_x5 8x60"},
        {MOVED: "_x5 24x60", of("fleet_partitions"): "_x5 8x60"},
        8,
    ),
    Example(
        "PartiMovesSlow",
        {MOVES["5.0"]: "_x5 1x60", MOVES["10.0"]: "_x5 9x60", MOVES["+Inf"]: "_x5 9x60"},
        {MOVES["5.0"]: "_x5 9x60", MOVES["10.0"]: "_x5 9x60", MOVES["+Inf"]: "_x5 9x60"},
        8,
    ),
)


def test_every_alert_on_growth_has_an_example_of_a_new_worker() -> None:
    growing = {alert.name for alert in alerts(Thresholds()) if "increase(" in alert.expr}
    assert {example.alert for example in NEW} == growing


def test_what_a_new_worker_counts_before_its_first_scrape_is_seen_once(promtool: Promtool) -> None:
    merged, asked = together(
        example._replace(fires={**example.fires, BEGAN: "_x5 350x90"}, silent={**example.silent, BEGAN: "_x5 350x90"})
        for example in NEW
    )
    promtool.ask(merged, [Expected(e.alert, e.minute, fires, where=where) for e, where, fires in asked])
    over = [Expected(e.alert, 70, fires=False, where=where) for e, where, _ in asked]
    promtool.ask(merged, over)


def test_a_prometheus_that_was_away_takes_no_old_worker_for_a_new_one(promtool: Promtool) -> None:
    merged, asked = together(
        example._replace(
            fires={**example.fires, BEGAN: "_x5 -86400x90"}, silent={**example.silent, BEGAN: "_x5 -86400x90"}
        )
        for example in NEW
    )
    promtool.ask(merged, [Expected(e.alert, e.minute, fires=False, where=where) for e, where, _ in asked])


def test_a_worker_that_begins_again_does_not_hide_what_it_counted_before(promtool: Promtool) -> None:
    series = {LOST: "0x5 1x2 0x60", BEGAN: "-900x7 430x60"}
    promtool.ask(
        series, [Expected("PartiLeaseLost", minute, fires) for minute, fires in ((4, False), (9, True), (25, False))]
    )


def test_a_wrong_expectation_fails(promtool: Promtool) -> None:
    with pytest.raises(AssertionError, match="PartiLag"):
        promtool.ask({of("consumer_lag"): "5x60"}, [Expected("PartiLag", 20, fires=True)])
