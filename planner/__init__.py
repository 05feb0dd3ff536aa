"""The control plane: plans which chunks each target reads from which sources, and lists what is running.
Needs no torch.
"""
