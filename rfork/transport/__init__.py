"""How bytes move: one-sided reads of image ranges, over whatever this machine has."""
