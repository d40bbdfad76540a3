"""Jobs: pieces of work that any worker may do, under a weighted scheduler, with heartbeats, on one pull consumer.

Imports `core`, `jetstream`, `telemetry`, `config` and `model`; knows nothing of fleets and lanes. Guards that slots
are never exceeded and never leak, that a job in hand is not started twice, and that it is acknowledged only after its
handler has returned and its record says so.
"""

from parti.core.admission import STRICT, LookAhead
from parti.jobs.app import JobApp
from parti.jobs.job import Job, JobInterrupted
from parti.jobs.scheduler import WeightedScheduler
from parti.jobs.settings import JobSettings, load_jobs
from parti.jobs.worker import JobWorker

__all__ = [
    "STRICT",
    "Job",
    "JobApp",
    "JobInterrupted",
    "JobSettings",
    "JobWorker",
    "LookAhead",
    "WeightedScheduler",
    "load_jobs",
]
