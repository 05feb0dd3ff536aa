"""Two-sided reads through torch.distributed's process groups: NCCL between GPUs, gloo between hosts.

For fleets without a one-sided transport. On a `Line` both sides agree on a group and on which range goes
when; the bytes go through the group. Whoever reaches the ports of a group is not kept out of it, so both
are used only where ``RFORK_TRANSPORTS`` names them.
"""

from rfork.transport.collective.transport import GlooTransport, NcclTransport

__all__ = ["GlooTransport", "NcclTransport"]
