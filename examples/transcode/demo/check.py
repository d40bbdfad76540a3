"""Compares what was to become of the uploads with what the store and the records of the jobs say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from examples.transcode.demo.picture import Used, measure
from examples.transcode.demo.uploads import Happening, Sample
from examples.transcode.ffmpeg import Video
from examples.transcode.manifest import Manifest

from parti.model.job import JobRecord, JobState


@dataclass(frozen=True, slots=True)
class Outcome:
    """What there is when all jobs have ended."""

    records: Sequence[JobRecord]
    """One for each event, in their order."""
    manifests: Mapping[str, Manifest]
    """By the key of the source."""
    results: Mapping[str, tuple[int, Video]]
    """Bytes of each result, and what ffmpeg finds in it, by its key."""
    dead_letters: int
    capacity: int

    @property
    def pieces(self) -> list[Used]:
        """Every piece of work, from the manifests."""
        return [
            Used(r.name, m.source.key, r.slots, r.asked_s, r.started_s, r.finished_s)
            for m in self.manifests.values()
            for r in m.results
        ]


def find_faults(happenings: Sequence[Happening], outcome: Outcome) -> list[str]:
    """Everything that is not as expected, in words."""
    return [*_of_jobs(happenings, outcome), *_of_results(happenings, outcome), *_of_slots(outcome)]


def _of_jobs(happenings: Sequence[Happening], outcome: Outcome) -> Iterator[str]:
    for number, (happening, record) in enumerate(zip(happenings, outcome.records, strict=True), 1):
        expected = JobState.FAILED if happening.refused else JobState.DONE
        if record.state is not expected:
            yield f"event {number} is {record.state.value}, expected {expected.value}: {record.error}"
        for sample in happening.samples:
            if sample.refused_for and f"{sample.refused_for}" not in record.error:
                yield f"event {number} was refused for {record.error!r}, expected {sample.refused_for!r}"
        if record.attempt != 1:
            yield f"event {number} took {record.attempt} attempts, expected 1"
    letters = sum(bool(happening.refused) for happening in happenings)
    if outcome.dead_letters != letters:
        yield f"there are {outcome.dead_letters} dead letters, expected {letters}"


def _of_results(happenings: Sequence[Happening], outcome: Outcome) -> Iterator[str]:
    good = {sample.key: sample for happening in happenings for sample in happening.samples if sample.resolutions}
    for key in outcome.manifests.keys() ^ good.keys():
        yield f"{key}: {'results of a bad file' if key in outcome.manifests else 'no results'}"
    for key in outcome.manifests.keys() & good.keys():
        yield from _of_one(good[key], outcome.manifests[key], outcome)
    listed = {result.key for manifest in outcome.manifests.values() for result in manifest.results}
    if listed != outcome.results.keys():
        yield f"results that no manifest lists, or the other way round: {sorted(listed ^ outcome.results.keys())}"


def _of_one(sample: Sample, manifest: Manifest, outcome: Outcome) -> Iterator[str]:
    made = tuple(result.name for result in manifest.results)
    if made != sample.resolutions:
        yield f"{sample.key} became {made}, expected {sample.resolutions}"
    for result in manifest.results:
        size, video = outcome.results.get(result.key, (0, None))
        if video is None or size != result.bytes:
            yield f"{result.key} has {size} bytes, but its manifest says {result.bytes}"
        elif (video.width, video.height) != (result.width, result.height):
            listed = f"{result.width}x{result.height}"
            yield f"{result.key} is {video.width}x{video.height}, but its manifest says {listed}"
        elif video.width > manifest.source.width:
            yield f"{result.key} is larger than its source"


def _of_slots(outcome: Outcome) -> Iterator[str]:
    usage = measure(outcome.pieces)
    if usage.most > outcome.capacity:
        yield f"{usage.most} slots were in use at once, of {outcome.capacity}"
    if usage.side_by_side < 2:
        yield "no two pieces of work ran side by side"
