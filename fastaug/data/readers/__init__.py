"""Readers of data formats, one module each; data/sources.py chooses among them.

The shards reader handles three formats, one file each: webdataset, tfrecord, recordio.
"""
