"""The control plane: decides who reads which chunks from whom, and lists what runs. Needs no torch."""
