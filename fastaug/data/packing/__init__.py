"""Packing: any data source into WebDataset shards with an index (fastaug.pack)."""
