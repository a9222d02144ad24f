"""Packed shards in object stores: s3://, gs://, http(s)://.

client: range reads with retries. cache: ranges on the local disk.
"""
