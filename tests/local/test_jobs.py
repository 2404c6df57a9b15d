"""The supervisor's table of jobs keeps its invariants in any order of events."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kinetic._devices import count_cpus, gpu_ids
from kinetic._labels import INDEX, SUBMISSION
from kinetic._supervisor.jobs import (
    ENDED_JOBS_KEPT,
    KEPT_S,
    QUEUED_S,
    Action,
    Grant,
    Job,
    Need,
    Report,
    SendSignal,
    SetTimer,
    Slots,
    State,
    Table,
)
from kinetic._supervisor.protocol import JobHeader
from kinetic.job_status import Reason


def new_job(name: str = "job", now: float = 0.0, **changes: Any) -> Job:
    fixed: dict[str, Any] = {"command": ("python",), "runner": "/r", "edition": "1", "labels": {}}
    header = JobHeader(name=name, **{**fixed, **changes})
    return Job(name=name, labels=header.labels, created=now, header=header, body=b"{}")


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def started(table: Table, *, executor: str = "e", **changes: Any) -> Job:
    table.add(new_job(**changes))
    job = table.take_next()
    assert job is not None
    table.start(job, executor)
    return job


def test_a_job_that_starts_has_its_timeout() -> None:
    table = Table(Slots(1))
    job = new_job(timeout=5.0, start_timeout=2.0)
    assert table.add(job) == [SetTimer(job, 2.0)]
    assert table.take_next() is job
    assert table.start(job, "e") == [Report(job), SetTimer(job, 5.0)]
    assert table.record_exit(job, 2.0, status=0, out_of_memory=False) == [Report(job)]
    assert not table.busy


def test_a_timeout_counts_from_the_call_of_the_function() -> None:
    table = Table(Slots(1))
    job = new_job(timeout=5.0, start_allowance=60.0)
    table.add(job)
    assert table.take_next() is job
    assert table.start(job, "e") == [Report(job), SetTimer(job, 65.0)]
    assert table.mark_called("e") == [SetTimer(job, 5.0)] and table.mark_called("other") == []
    table.handle_timer(job, 1.0)
    assert table.mark_called("e") == [], "a job that has to end gets no more time"


def test_a_worker_whose_predecessor_has_ended_rests_before_it_waits_for_slots() -> None:
    table = Table(Slots(1))
    job = new_job()
    assert table.add(job, 2.5) == [SetTimer(job, 2.5)]
    assert table.busy and table.take_next() is None
    assert table.handle_timer(job, 3.0) == []
    assert table.take_next() is job


def test_a_death_is_known_until_a_client_has_heard_of_it() -> None:
    table = Table(Slots(1))
    labels = {INDEX: "0"}
    for status, unheard in ((0, False), (42, False), (44, False), (43, True), (-9, True)):
        job = started(table, name=str(status), labels=labels)
        table.record_exit(job, 1.0, status=status, out_of_memory=False)
        assert table.knows_unheard_end is unheard
        job.heard = True
    worker = started(table, name="worker")
    table.record_exit(worker, 1.0, status=-9, out_of_memory=False)
    assert not table.knows_unheard_end


def test_a_deleted_job_keeps_its_slot_until_it_is_gone() -> None:
    table = Table(Slots(1))
    job = started(table, grace=3.0)
    assert kinds(table.delete(job)) == ["RemoveLog", "Report", "SendSignal", "SetTimer"]
    assert table.delete(job) == []
    table.add(new_job("next"))
    assert table.take_next() is None
    assert table.handle_timer(job, 4.0) == [SendSignal(job, signal.SIGKILL)]
    actions = table.record_exit(job, 4.0, status=-9, out_of_memory=False)
    assert kinds(actions) == ["RemoveLog", "Report"]
    assert (job.state, job.reason) == (State.GONE, Reason.CANCELLED)
    assert table.take_next() is not None


def test_a_waiting_job_reports_its_reason_and_each_change() -> None:
    table = Table(Slots(2, ("0",)))
    first, _ = (started(table, name=name, executor=name) for name in ("first", "second"))
    table.add(new_job("third", 10.0))
    table.add(new_job("wide", 10.0, cpus=2))
    third, wide = table.jobs["third"], table.jobs["wide"]
    assert [*table.report_waiting(10.0 + QUEUED_S / 2)] == []
    assert [*table.report_waiting(10.0 + QUEUED_S)] == [Report(third), Report(wide)]
    assert third.message == "waiting for a slot: 2 of 2 busy with first, second"
    assert wide.message == "waiting for 2 slots: 2 of 2 busy with first, second"
    assert [*table.report_waiting(100.0)] == [], "the reasons haven't changed"
    table.record_exit(first, 101.0, status=0, out_of_memory=False)
    assert table.take_next() is third
    table.start(third, "e")
    assert third.message == ""
    assert [*table.report_waiting(103.0)] == [Report(wide)]
    assert wide.message == "waiting for 2 slots: 2 of 2 busy with second, third"


def test_items_of_a_batch_are_named_by_its_id() -> None:
    table = Table(Slots(2))
    for name in ("grp-1-0-1", "grp-1-1-1"):
        started(table, name=name, executor=name, labels={SUBMISSION: "grp-1"})
    table.add(new_job("third", 10.0))
    assert [*table.report_waiting(10.0 + QUEUED_S)]
    assert table.jobs["third"].message == "waiting for a slot: 2 of 2 busy with grp-1"


def test_a_paused_worker_is_not_named_as_a_holder_of_slots() -> None:
    table = Table(Slots(2))
    idle = started(table, name="grp-1-w0", executor="idle", labels={SUBMISSION: "grp-1"})
    table.pause(idle)
    for name in ("grp-2-w0", "grp-2-w1"):
        table.add(new_job(name, labels={SUBMISSION: "grp-2"}))
    while (job := table.take_next()) is not None:
        if job is idle:
            table.pause(idle)
        else:
            table.start(job, job.name)
    table.add(new_job("third", 10.0))
    assert [*table.report_waiting(10.0 + QUEUED_S)]
    assert table.jobs["third"].message == "waiting for a slot: 2 of 2 busy with grp-2"


def test_a_cancelled_job_keeps_its_log_until_a_cleanup() -> None:
    table = Table(Slots(2))
    cancelled, cleaned = (started(table, name=name, executor=name) for name in ("a", "b"))
    for job in (cancelled, cleaned):
        assert kinds(table.delete(job, keep_log=True)) == ["Report", "SendSignal", "SetTimer"]
    table.delete(cleaned)  # while it ends
    table.delete(cleaned, keep_log=True)
    for job, actions in ((cancelled, ["Report"]), (cleaned, ["RemoveLog", "Report"])):
        assert kinds(table.record_exit(job, 1.0, status=0, out_of_memory=False)) == actions


def test_deleting_after_the_deadline_does_not_ask_twice() -> None:
    table = Table(Slots(1))
    job = started(table, timeout=1.0)
    assert kinds(table.handle_timer(job, 2.0)) == ["SendSignal", "SetTimer"]
    assert kinds(table.delete(job)) == ["RemoveLog", "Report"]


def test_timers_of_jobs_that_are_over_do_nothing() -> None:
    table = Table(Slots(1))
    job = started(table, timeout=1.0, start_timeout=1.0)
    table.record_exit(job, 2.0, status=0, out_of_memory=False)
    assert table.handle_timer(job, 3.0) == []


def test_a_deadline_met_in_its_grace_is_no_failure() -> None:
    table = Table(Slots(1))
    job = started(table, timeout=1.0)
    table.handle_timer(job, 2.0)
    table.record_exit(job, 2.0, status=0, out_of_memory=False)
    assert (job.reason, job.message) == ("", "")


def test_jobs_without_a_gpu_do_not_wait_for_one() -> None:
    table = Table(Slots(2, ("0",)))
    for name, gpus in (("g1", 1), ("g2", 1), ("c1", 0), ("g3", 1), ("c2", 0)):
        table.add(new_job(name, gpus=gpus))
    first, second = table.take_next(), table.take_next()
    assert first is not None and second is not None
    assert (first.name, second.name, table.take_next()) == ("g1", "c1", None)
    assert first.grant == Grant(1, ("0",))


def test_submissions_take_turns() -> None:
    table = Table(Slots(1))
    names = ["a1", "a2", "a3", "b1", "b2", "c1"]
    for name in names:
        table.add(new_job(name, labels={SUBMISSION: name[0]}))
    gone = table.jobs["b1"]
    table.delete(gone)
    order = []
    while (job := table.take_next()) is not None:
        order.append(job.name)
        table.start(job, job.name)
        table.record_exit(job, 1.0, status=0, out_of_memory=False)
    assert order == ["a1", "b2", "c1", "a2", "a3"]


def test_a_worker_that_pauses_lets_each_other_submission_go_first() -> None:
    table = Table(Slots(1))
    for name in ("a1", "b1", "b2", "c1"):
        table.add(new_job(name, labels={SUBMISSION: name[0]}))
    order = []
    for _ in range(9):
        job = table.take_next()
        assert job is not None
        order.append(job.name)
        if job.state is State.QUEUED:
            table.start(job, job.name)
        table.pause(job)
    assert order == ["a1", "b1", "c1", "a1", "b2", "c1", "a1", "b1", "c1"]


def test_a_gpu_job_that_lacks_a_cpu_goes_first() -> None:
    table = Table(Slots(2, ("0",)))
    table.add(new_job("c1"))
    assert table.take_next() is not None
    table.add(new_job("g", gpus=1, cpus=2))
    table.add(new_job("c2"))
    assert table.take_next() is None  # jobs like c2 could keep g waiting for ever


@pytest.mark.parametrize(("kept_s", "table"), [(KEPT_S, Table(Slots(2))), (9, Table(Slots(2), 9))])
def test_old_jobs_are_forgotten_and_their_logs_stay(kept_s: float, table: Table) -> None:
    job = started(table)
    table.record_exit(job, 100.0, status=0, out_of_memory=False)
    assert table.forget_expired(100.0 + kept_s) == []
    assert table.forget_expired(101.0 + kept_s) == [Report(job)]
    assert table.jobs == {} and job.state is State.GONE


def test_a_supervisor_remembers_so_many_ended_jobs_and_no_more() -> None:
    table, gone = Table(Slots(1)), list[str]()
    for number in range(ENDED_JOBS_KEPT + 10):
        job = started(table, name=f"j{number}")
        table.record_exit(job, float(number), status=0, out_of_memory=False)
        for action in table.forget_expired(float(number)):
            gone += [action.job.name] if isinstance(action, Report) else []
    assert [*table.jobs] == [f"j{number}" for number in range(10, ENDED_JOBS_KEPT + 10)]
    assert all(job.body == b"" for job in table.jobs.values())
    assert gone == [f"j{number}" for number in range(10)]


class Machine(RuleBasedStateMachine):
    """A supervisor without processes."""

    jobs: Bundle[str] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.running: dict[str, Job] = {}
        self.executors = 0
        self.told: dict[Job, list[State]] = {}
        self.table = Table(Slots(3, ("0", "1")))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Report(job):
                    states = self.told.setdefault(job, [])
                    assert not states or states[-1] not in (State.GONE,)
                    states.append(job.state)
                case _:
                    pass

    def schedule(self) -> None:
        while (job := self.table.take_next()) is not None:
            self.executors += 1
            self.carry_out(self.table.start(job, f"e{self.executors}"))
            self.running[job.executor] = job

    @rule(
        target=jobs,
        name=st.sampled_from("abcdefgh"),
        cpus=st.integers(1, 4),
        gpus=st.integers(0, 3),
    )
    def launch(self, name: str, cpus: int, gpus: int) -> str:
        if name not in self.table.jobs:
            job = new_job(name, self.clock, cpus=cpus, gpus=gpus, timeout=9.0, start_timeout=9.0)
            self.carry_out(self.table.add(job))
            self.schedule()
        return name

    @rule(name=jobs)
    def delete(self, name: str) -> None:
        if name in self.table.jobs:
            self.carry_out(self.table.delete(self.table.jobs[name]))
            self.schedule()

    @rule(name=jobs)
    def due(self, name: str) -> None:
        if name in self.table.jobs:
            self.carry_out(self.table.handle_timer(self.table.jobs[name], self.clock))
            self.schedule()

    @rule(data=st.data(), status=st.sampled_from([0, 1, -9, -15]))
    def end(self, data: st.DataObject, status: int) -> None:
        if self.running:
            job = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
            self.carry_out(
                self.table.record_exit(job, self.clock, status=status, out_of_memory=False)
            )
            self.schedule()

    @rule(hours=st.integers(1, 30))
    def wait(self, hours: int) -> None:
        self.clock += hours * 3600.0
        self.carry_out(self.table.forget_expired(self.clock))

    @invariant()
    def slots_add_up(self) -> None:
        running = [job for job in self.table.jobs.values() if job.state is State.RUNNING]
        assert sum(job.need.cpus for job in running) <= 3
        gpus = [gpu for job in running if job.grant for gpu in job.grant.gpus]
        assert len(gpus) == len(set(gpus)) <= 2
        assert {job.executor for job in running} == set(self.running)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        queued = [job for job in self.table.jobs.values() if job.state is State.QUEUED]
        assert not queued or self.running
        assert self.table.busy == bool(queued or self.running)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_needs_are_cut_down_to_the_machine() -> None:
    slots = Slots(4, ("a", "b"))
    assert slots.fit(Need(99, 99)) == Need(4, 2)
    assert slots.fit(Need(0, 0)) == Need(1, 0)


def test_slots_come_from_the_environment_or_the_machine() -> None:
    assert count_cpus({"KINETIC_LOCAL_SLOTS": "7"}) == 7
    assert count_cpus({"KINETIC_LOCAL_SLOTS": "none"}) == count_cpus({}) >= 1
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": " 1, 0,1 ,-1,2"}) == ("1", "0")
