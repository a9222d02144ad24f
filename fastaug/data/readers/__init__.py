"""Readers of data formats; data/sources.py chooses among them.

A reader is a module with DESCRIPTION, matches() and open_split(): folder, npz, cifar, shards. The
shards reader handles three formats, one file each: webdataset, tfrecord, recordio.
"""
