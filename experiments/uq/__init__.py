"""What the studies of uncertainty share: the cache, the scores, the data and the way they are started."""
