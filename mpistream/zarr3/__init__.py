"""Our own encoder and decoder of Zarr v3 shards, and the documents around them."""
