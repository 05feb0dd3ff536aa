"""Hugging Face folders of safetensors files, loaded complete or as chunks of an image."""
