"""Partition keys from subjects, as native Spark expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parti.errors import ConfigError
from parti.model.partition import Template

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_keys(frame: DataFrame, template: str, *, partition: str | None = None) -> DataFrame:
    """Add a column for each key of a subject template, from the column `subject`.

    Rows whose subject does not fit the template get nulls. With `partition`, a column of that name gets the id of
    the partition: the values joined by dots, as everywhere in parti.

        with_keys(frame, "dc.{tool}.{chamber}.completion").groupBy("tool").count()
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 - needs the `spark` extra

    parsed = Template(template)
    present = {column.lower() for column in frame.columns}
    taken = [key for key in parsed.keys if key.lower() in present]
    if taken:
        raise ConfigError(f"template {template!r}: there is a column {taken[0]!r} already; choose another key")
    places = parsed.places
    tokens = f.split(f.col("subject"), r"\.")
    fits = f.size(tokens) == len(places)
    for index, (literal, _) in enumerate(places):
        if literal is not None:
            fits = fits & (tokens[index] == literal)
    columns = {key: f.when(fits, tokens[index]) for index, (_, key) in enumerate(places) if key is not None}
    if partition is not None:
        values = list(columns.values())
        columns[partition] = f.concat_ws(".", *values) if values else f.when(fits, f.col("subject"))
        if values:
            columns[partition] = f.when(fits, columns[partition])
    return frame.withColumns(columns)
