"""A transcode worker: object-store events in, videos in several resolutions out.

`app` is what `parti jobs run` starts; `transcoder` takes one uploaded object from download to results. Around it, one
subject each: `events` (what an object store sends), `stores` and `s3` (where objects lie), `media` and `clamd` (may
this file be touched), `ladder` (which resolutions, at what cost), `ffmpeg` (the child process), `manifest` (what was
made), `workplace` (temporary files). `demo` is `make demo-transcode`.

Guide: docs/transcode.md.
"""
