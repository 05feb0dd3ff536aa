"""Two-sided reads over torch.distributed process groups: NCCL between GPUs, gloo between hosts.

For fleets without a one-sided transport. Both sides use a `ControlStream` to agree on a group and on the next
range to send; the bytes go through the group. The ports of a group do not authenticate clients, so both
transports are used only if ``RFORK_TRANSPORTS`` names them.
"""

from rfork.transport.collective.transport import gloo_transport, nccl_transport

__all__ = ["gloo_transport", "nccl_transport"]
