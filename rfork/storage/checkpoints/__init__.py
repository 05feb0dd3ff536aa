"""Hugging Face folders of safetensors files, whole or as chunks of an image."""
