"""Values that everything else speaks of: partitions, subject templates and messages.

Imports nothing but `parti.errors`. Nothing here does I/O, reads a clock or changes after it was made,
except `Message.attempt`, which its lane counts up.
"""
