"""Readers of data formats; data/sources.py chooses among them.

A reader is a module with the names of `sources.Reader`. The shards reader handles three formats,
one file each: webdataset, tfrecord, recordio.
"""
