"""Read by each Python that Spark starts in tests: the processes that fork the workers import what all of these need.

Otherwise each of the many short-lived workers would import pandas and Arrow for itself, two seconds of CPU each time.
"""

import sys

if "pyspark.daemon" in sys.orig_argv:
    import parti.spark.source  # noqa: F401
