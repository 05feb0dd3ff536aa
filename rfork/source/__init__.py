"""The source side: a seed (complete) or a relay (still receiving) in this process."""
