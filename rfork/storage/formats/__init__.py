"""What a URI holds, as named tensors: safetensors files and folders, and which format it is."""
