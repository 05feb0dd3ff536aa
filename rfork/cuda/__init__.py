"""The CUDA driver, for all of rfork's work on GPUs: contexts, streams, events, copies and pinned memory.

An engine shares its process and its GPUs with rfork's threads. Three rules keep rfork out of its way:

- Every call runs inside `CudaDriver.on_device`: in the primary context of the right device, so that no context is
  created on another GPU, and with a relaxed capture mode, so that an engine that captures a CUDA graph on another
  thread is not disturbed.
- Copies and kernels run on streams of rfork, never on torch's pooled streams, which an engine's capture may use.
- Nothing waits for a complete device: only for events on these streams, or on the stream that the caller works on.
"""
